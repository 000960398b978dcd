"""The metric catalogue: every statistic that travels, every metric made from it, every scalar with a reserved name.

A *statistic* is an estimated total that a worker sends; it declares how it merges over shards and over steps.
A *metric* is what a reader sees; it is made from statistics by the finishing functions of
`collage_monitor.statistics`. A *scalar* is logged by the training loop or by the agent about itself.
A key is NAME or NAME/label (`state_decrement_ratio/exp_avg_sq`); it is the same in code, wire, route and column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from collage_monitor.errors import CatalogueError

__all__ = [
    "HISTOGRAM_LABELS",
    "HISTOGRAM_OCTAVES",
    "METRICS",
    "Metric",
    "OverShards",
    "OverSteps",
    "SCALARS",
    "STATISTICS",
    "Scalar",
    "Statistic",
    "metric",
    "split_key",
    "statistic",
]

OverShards = Literal["sum", "max", "min"]
OverSteps = Literal["sum", "last", "max", "min", "root_sum"]
_Entry = TypeVar("_Entry", "Statistic", "Metric")

HISTOGRAM_OCTAVES: Final = tuple(range(-24, 8))
"""Octave k holds |u| / gap in [2**k, 2**(k+1))."""
HISTOGRAM_LABELS: Final = ("underflow", *(str(octave) for octave in HISTOGRAM_OCTAVES), "overflow")


@dataclass(frozen=True)
class Statistic:
    """One estimated total: what it is and how it merges. `label` names what stands behind the slash of its key."""

    name: str
    over_shards: OverShards
    over_steps: OverSteps
    unit: str
    help: str
    label: str | None = None


@dataclass(frozen=True)
class Metric:
    """One number that readers see.

    `unit` is one of "ratio", "elements", "weight", "gradient", "octaves", "factor", "steps".
    `ideal` is the value of a run that loses nothing (None: there is no such value).
    `interval` says that a 95 % interval exists. `exposed` puts the model's value on `/metrics`.
    """

    name: str
    title: str
    unit: str
    formula: str
    help: str
    label: str | None = None
    ideal: float | None = None
    interval: bool = False
    exposed: bool = False


@dataclass(frozen=True)
class Scalar:
    """One logged number with a reserved meaning. `source` is "loop" (the user's) or "agent" (about itself)."""

    name: str
    title: str
    unit: str
    source: Literal["loop", "agent"]
    help: str


def _sum(name: str, unit: str, text: str, label: str | None = None) -> Statistic:
    return Statistic(name, "sum", "sum", unit, text, label)


_STATISTICS = (
    Statistic("measured_steps", "max", "sum", "steps", "Measured steps merged into the totals."),
    _sum("elements", "elements", "Elements of the tensor shard."),
    _sum("sampled", "elements", "Elements really looked at: raw, never scaled up."),
    Statistic("active_blocks", "sum", "max", "blocks", "Sampled blocks with some u ≠ 0: raw, never scaled up."),
    _sum("nonfinite", "elements", "θ, g, u or e not finite; left out of every sum and ratio."),
    _sum("idle", "elements", "u = 0: nothing was intended."),
    _sum("stray", "elements", "Idle elements with e ≠ 0."),
    _sum("lost", "elements", "u ≠ 0 and e = 0: rounded away."),
    _sum("distorted", "elements", "u ≠ 0, e ≠ 0 and |e − u| > ½|u|."),
    _sum("reversed", "elements", "Distorted elements with e·u < 0."),
    _sum("faithful", "elements", "u ≠ 0, e ≠ 0 and |e − u| ≤ ½|u|."),
    _sum("lost_visible", "elements", "u ≠ 0 and eᵛ = 0: the registered parameter did not move."),
    _sum("unchanged", "elements", "Finite elements with eᵛ = 0, idle ones included."),
    _sum("intended_squared_sum", "weight²", "Σ u²"),
    _sum("intended_effective_sum", "weight²", "Σ u·e"),
    _sum("effective_squared_sum", "weight²", "Σ e²"),
    _sum("intended_visible_sum", "weight²", "Σ u·eᵛ"),
    _sum("visible_squared_sum", "weight²", "Σ eᵛ²"),
    _sum("gradient_squared_sum", "gradient²", "Σ g²"),
    Statistic("parameter_squared_sum", "sum", "last", "weight²", "Σ θ² before the step."),
    _sum("nonfinite_gradients", "elements", "Elements whose gradient is not finite."),
    Statistic("nonfinite_parameters", "sum", "max", "elements", "Elements whose weight is not finite."),
    _sum("update_ulp_histogram", "elements", "Non-idle elements by |u| / gap, in octaves.", "octave"),
    _sum(
        "state_decrement_observed_sum",
        "state",
        "Σ (|s after| − |s before|) as stored, over elements whose |s| should shrink.",
        "state",
    ),
    _sum("state_decrement_intended_sum", "state", "The same sum in exact arithmetic.", "state"),
    Statistic(
        "variance_numerator",
        "sum",
        "root_sum",
        "metric's²",
        "Variance of a ratio's estimated numerator.",
        "metric",
    ),
    Statistic(
        "variance_denominator",
        "sum",
        "root_sum",
        "metric's²",
        "Variance of its estimated denominator.",
        "metric",
    ),
    _sum("covariance", "metric's²", "Covariance of the two.", "metric"),
    _sum("variance_product_root", "metric's²", "√(V_AA·V_BB) of each step, made after shards merged.", "metric"),
    Statistic("oracle_steps", "max", "last", "steps", "Steps since the oracle was attached."),
    _sum("oracle_sampled", "elements", "Elements that the oracle follows: raw."),
    _sum("oracle_elements", "elements", "Elements that they stand for."),
    Statistic("oracle_active_blocks", "sum", "max", "blocks", "Oracle blocks with some o ≠ 0: raw."),
    _sum("oracle_squared_sum", "weight²", "Σ o²"),
    _sum("oracle_effective_sum", "weight²", "Σ o·e, on the oracle's sample."),
    _sum("oracle_intended_squared_sum", "weight²", "Σ u², on the oracle's sample."),
    Statistic("oracle_displacement_squared_sum", "sum", "last", "weight²", "Σ O², since attach."),
    Statistic("oracle_displacement_effective_sum", "sum", "last", "weight²", "Σ O·E, since attach."),
    Statistic("oracle_drift_squared_sum", "sum", "last", "weight²", "Σ (E − O)², since attach."),
)
STATISTICS: Final = {entry.name: entry for entry in _STATISTICS}

_CLASS_METRICS = tuple(
    Metric(entry.name, entry.name, "elements", f"Σ {entry.name}", entry.help)
    for entry in _STATISTICS
    if entry.name
    in {"elements", "sampled", "nonfinite", "idle", "stray", "lost", "distorted", "reversed", "faithful"}
)

_METRICS = (
    Metric(
        "edq_ratio",
        "EDQ",
        "ratio",
        "Σ u·e / Σ u²",
        "Share of the intended descent that arrived: 1 all, 0 none, above 1 overshoot, below 0 the wrong way. "
        "Blind to errors already in the optimizer state: read it beside state_decrement_ratio or the oracle.",
        ideal=1.0,
        interval=True,
        exposed=True,
    ),
    Metric(
        "edq",
        "EDQ, weight units",
        "weight",
        "Σ u·e / √(Σ u² · measured_steps)",
        "The paper's effective descent quality: length of the effective update along the intended one.",
    ),
    Metric(
        "edq_cosine",
        "EDQ cosine",
        "ratio",
        "Σ u·e / √(Σ u² · Σ e²)",
        "Direction of the effective update against the intended one.",
        ideal=1.0,
    ),
    Metric(
        "edq_visible_ratio",
        "EDQ, visible",
        "ratio",
        "Σ u·eᵛ / Σ u²",
        "The same for the registered parameter: what the forward pass sees.",
        ideal=1.0,
        interval=True,
        exposed=True,
    ),
    Metric(
        "lost_update_ratio",
        "Updates lost",
        "ratio",
        "lost / (elements − nonfinite − idle)",
        "Share of the intended updates that were rounded away in this step. "
        "Misjudges stochastic rounding, whose updates arrive in the mean.",
        ideal=0.0,
        interval=True,
        exposed=True,
    ),
    Metric(
        "lost_visible_ratio",
        "Updates lost, visible",
        "ratio",
        "lost_visible / (elements − nonfinite − idle)",
        "Share of the intended updates that did not move the registered parameter.",
        ideal=0.0,
        interval=True,
    ),
    Metric(
        "unchanged_ratio",
        "Unchanged",
        "ratio",
        "unchanged / (elements − nonfinite)",
        "The paper's imprecision. It counts idle elements as lost; for comparison with published figures only.",
    ),
    Metric(
        "state_decrement_ratio",
        "State decrement",
        "ratio",
        "Σ (|s after| − |s before|) observed / intended, where |s| should shrink",
        "1: the moving average decays as it should. 0: it can only grow, and steps become too small.",
        label="state",
        ideal=1.0,
        exposed=True,
    ),
    Metric(
        "edq_oracle_ratio",
        "EDQ against the oracle",
        "ratio",
        "Σ o·e / Σ o²",
        "This step against an fp64 optimizer that has kept its own weights and states since attach. Judge |1 − x|.",
        ideal=1.0,
        interval=True,
        exposed=True,
    ),
    Metric(
        "oracle_step_norm_ratio",
        "Step size against the oracle",
        "ratio",
        "√(Σ u² / Σ o²)",
        "Above 1 the steps are too large, below 1 too small.",
        ideal=1.0,
    ),
    Metric(
        "oracle_displacement_ratio",
        "Displacement against the oracle",
        "ratio",
        "Σ O·E / Σ O²",
        "How far the weights have come since attach, along the oracle's way. Compare at equal oracle_steps only.",
        ideal=1.0,
    ),
    Metric(
        "oracle_drift_ratio",
        "Drift from the oracle",
        "ratio",
        "√(Σ (E − O)² / Σ O²)",
        "Distance from where the oracle stands, in units of its displacement.",
        ideal=0.0,
    ),
    Metric("oracle_steps", "Oracle steps", "steps", "oracle_steps", "Steps since the oracle was attached."),
    Metric("grad_norm", "Gradient norm", "gradient", "√(Σ g² / measured_steps)", "After unscaling and clipping."),
    Metric("param_norm", "Weight norm", "weight", "√Σ θ²", "Before the step."),
    Metric("intended_norm", "Intended update norm", "weight", "√(Σ u² / measured_steps)", "L2 norm of u."),
    Metric("effective_norm", "Effective update norm", "weight", "√(Σ e² / measured_steps)", "L2 norm of e."),
    Metric(
        "update_to_weight_ratio",
        "Update to weight",
        "ratio",
        "intended_norm / param_norm",
        "Size of an intended step beside the weights.",
        exposed=True,
    ),
    Metric(
        "predicted_plain_lost_ratio",
        "Below half a gap",
        "ratio",
        "share of update_ulp_histogram below ½",
        "Share of the updates that plain storage in this dtype would round away. "
        "Predicts nothing for pairs or master weights.",
        ideal=0.0,
    ),
    Metric(
        "half_ulp_margin",
        "Half-ulp margin",
        "octaves",
        "median log₂(|u| / ½gap)",
        "Positive: the median update is large enough for plain storage.",
    ),
    Metric(
        "half_ulp_lr_factor",
        "Half-ulp learning-rate factor",
        "factor",
        "2^(−1 − tenth percentile of log₂(|u| / gap))",
        "Factor on the learning rate at which 10 % of the updates would stand below half a gap. "
        "It describes the grid; it is no advice to raise the learning rate.",
    ),
    Metric(
        "nonfinite_grads",
        "Non-finite gradients",
        "elements",
        "Σ nonfinite_gradients",
        "Gradient elements that are NaN or infinite.",
        ideal=0.0,
    ),
    Metric(
        "nonfinite_params",
        "Non-finite weights",
        "elements",
        "max nonfinite_parameters",
        "Weights that are NaN or infinite.",
        ideal=0.0,
    ),
    *_CLASS_METRICS,
)
METRICS: Final = {entry.name: entry for entry in _METRICS}

_SCALARS = (
    Scalar("loss", "Training loss", "loss", "loop", "Loss of the step."),
    Scalar("validation_loss", "Validation loss", "loss", "loop", "Loss on held-out data."),
    Scalar("tokens", "Tokens", "tokens", "loop", "Tokens seen since the start of the run, over all ranks."),
    Scalar("learning_rate", "Learning rate", "1", "loop", "Learning rate of the step."),
    Scalar("grad_norm_unclipped", "Gradient norm before clipping", "gradient", "loop", "As clipping returned it."),
    Scalar("tokens_per_second", "Tokens per second", "tokens/s", "loop", "Training throughput."),
    Scalar("memory_bytes", "Memory", "bytes", "loop", "Peak memory of the training process."),
    Scalar(
        "bytes_per_parameter",
        "Bytes per parameter",
        "bytes",
        "agent",
        "Weights, optimizer states and gradients, from their storages.",
    ),
    Scalar("agent_cpu_seconds", "Agent CPU", "seconds", "agent", "CPU that the agent has used since attach."),
    Scalar(
        "agent_overhead_ratio",
        "Agent overhead",
        "ratio",
        "agent",
        "CPU of the agent over the rest of the process's CPU, since attach.",
    ),
    Scalar(
        "agent_wall_seconds",
        "Agent time",
        "seconds",
        "agent",
        "Time that the training thread has spent in the agent since attach.",
    ),
    Scalar(
        "agent_memory_bytes",
        "Agent memory",
        "bytes",
        "agent",
        "Buffers that the agent keeps on the parameters' devices between steps.",
    ),
    Scalar(
        "agent_interval",
        "Measuring interval",
        "steps",
        "agent",
        "Steps between measured ones, where the governor had to lengthen it.",
    ),
    Scalar(
        "agent_sample",
        "Sample",
        "elements",
        "agent",
        "Elements looked at in each tensor, where the governor had to shorten the sample.",
    ),
    Scalar("skipped_steps", "Skipped steps", "steps", "agent", "Steps that the loss scaler skipped, since attach."),
    Scalar(
        "reports_dropped",
        "Reports dropped",
        "reports",
        "agent",
        "Reports that the agent gave up, since start.",
    ),
)
SCALARS: Final = {entry.name: entry for entry in _SCALARS}


def split_key(key: str) -> tuple[str, str | None]:
    """("state_decrement_ratio/exp_avg_sq") → ("state_decrement_ratio", "exp_avg_sq"); no slash: label None."""
    name, slash, label = key.partition("/")
    return name, (label if slash else None)


def statistic(key: str) -> Statistic:
    """The catalogue entry of a statistic's key.

    Raises:
        CatalogueError: unknown name, or a label that is missing or not wanted.
    """
    return _look_up(key, STATISTICS, "statistic")


def metric(key: str) -> Metric:
    """The catalogue entry of a metric's key.

    Raises:
        CatalogueError: unknown name, or a label that is missing or not wanted.
    """
    return _look_up(key, METRICS, "metric")


def _look_up(key: str, table: dict[str, _Entry], kind: str) -> _Entry:
    name, label = split_key(key)
    entry = table.get(name)
    if entry is None:
        raise CatalogueError(f"no {kind} is called {name!r}; GET /api/v1/metrics-catalogue lists them")
    if label is not None if entry.label is None else not label:
        wanted = f"a label, {name}/{entry.label.upper()}" if entry.label else "no label"
        raise CatalogueError(f"{kind} {key!r}: {name} takes {wanted}")
    if name == "update_ulp_histogram" and label not in HISTOGRAM_LABELS:
        raise CatalogueError(f"{kind} {key!r}: octaves run from {HISTOGRAM_LABELS[1]} to {HISTOGRAM_LABELS[-2]}")
    return entry
