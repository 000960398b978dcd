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
from collage_monitor.totals import (
    HISTOGRAM_LABELS,
    HISTOGRAM_OCTAVES,
    STATISTICS,
    OverShards,
    OverSteps,
    Statistic,
)

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

_Entry = TypeVar("_Entry", "Statistic", "Metric")


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
    """One logged number with a reserved meaning. `source` is "loop" (the user's), "agent" (about itself) or
    "server" (made from others)."""

    name: str
    title: str
    unit: str
    source: Literal["loop", "agent", "server"]
    help: str


_CLASS_METRICS = tuple(
    Metric(entry.name, entry.name, "elements", f"Σ {entry.name}", entry.help)
    for entry in STATISTICS.values()
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
        "edq_window_ratio",
        "EDQ over a window",
        "ratio",
        "Σ U·E / Σ U², U = Σ u and E = the change of θ over k steps",
        "As edq_ratio, for k steps together. Hardly depends on k: one step forecasts it.",
        label="steps",
        ideal=1.0,
    ),
    Metric(
        "edq_window_cosine",
        "EDQ cosine over a window",
        "ratio",
        "Σ U·E / √(Σ U² · Σ E²)",
        "Direction over k steps: nears 1 with k where errors even out, as stochastic rounding's do.",
        label="steps",
        ideal=1.0,
    ),
    Metric(
        "lost_window_ratio",
        "Updates lost over a window",
        "ratio",
        "window_lost / window_active",
        "Share of the updates intended over k steps that left the stored weight where it was. "
        "Judges stochastic rounding, which one step misjudges.",
        label="steps",
        ideal=0.0,
    ),
    Metric(
        "edq_visible_window_ratio",
        "EDQ over a window, visible",
        "ratio",
        "Σ U·Eᵛ / Σ U²",
        "The same for the registered parameter.",
        label="steps",
        ideal=1.0,
    ),
    Metric(
        "edq_visible_window_cosine",
        "EDQ cosine over a window, visible",
        "ratio",
        "Σ U·Eᵛ / √(Σ U² · Σ Eᵛ²)",
        "Direction over k steps of the registered parameter.",
        label="steps",
        ideal=1.0,
    ),
    Metric(
        "lost_visible_window_ratio",
        "Updates lost over a window, visible",
        "ratio",
        "window_lost_visible / window_active",
        "Share of the updates intended over k steps that did not move the registered parameter. "
        "Judges Kahan's, which one step misjudges.",
        label="steps",
        ideal=0.0,
    ),
    Metric(
        "counterfactual_edq_ratio",
        "EDQ, had the weights been kept otherwise",
        "ratio",
        "counterfactual_kept_sum / counterfactual_squared_sum",
        "What another method would have kept of these very steps, from the same θ and u. "
        "Stochastic rounding keeps 1 in expectation: see its variance.",
        label="method/dtype",
        ideal=1.0,
    ),
    Metric(
        "counterfactual_variance_ratio",
        "Noise, had the weights been kept otherwise",
        "ratio",
        "counterfactual_variance_sum / counterfactual_squared_sum",
        "How much noise stochastic rounding would have added to an update, in units of the update's square.",
        label="method/dtype",
        ideal=0.0,
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
        "state_zero_ratio",
        "State zero",
        "ratio",
        "state_zero / gradient_nonzero",
        "Share of a state's elements that are 0 where the gradient is not: an fp16 second moment that underflows.",
        label="state",
        ideal=0.0,
    ),
    Metric(
        "decay_ratio",
        "Weight decay kept",
        "ratio",
        "Σ d·d̂ / Σ d²",
        "Share of decoupled weight decay that is kept as a rounded operation of its own, as torch makes it. "
        "Undefined for decay that is coupled or zero; a strategy that makes it part of its update keeps more.",
        ideal=1.0,
    ),
    Metric(
        "residual_fill_ratio",
        "Residual fill",
        "ratio",
        "residual_fill_sum / residual_elements",
        "Mean of |r| / ½gap(θᵛ), before the step, where the weight is kept as a sum θᵛ + r: about ½ in training.",
    ),
    Metric(
        "residual_zero_ratio",
        "Residual zero",
        "ratio",
        "residual_zero / residual_elements",
        "Share of the residuals that are 0 before the step. 1 is normal at the first step; a jump after a resume "
        "means a checkpoint that dropped them.",
    ),
    Metric(
        "residual_nonfinite",
        "Residuals not finite",
        "elements",
        "residual_nonfinite",
        "Residuals that are NaN or infinite.",
        ideal=0.0,
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
    Scalar(
        "clip_ratio",
        "Clip ratio",
        "ratio",
        "server",
        "grad_norm / grad_norm_unclipped, at measured steps that log the latter; a logged one stands before it.",
    ),
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
    Scalar(
        "oracle_restarts",
        "Oracle restarts",
        "restarts",
        "agent",
        "Times that weights were written between two steps or a step raised, so that the oracle attached anew, "
        "since attach.",
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
    if entry.label == "octave" and label not in HISTOGRAM_LABELS:
        raise CatalogueError(f"{kind} {key!r}: octaves run from {HISTOGRAM_LABELS[1]} to {HISTOGRAM_LABELS[-2]}")
    if entry.label == "method/dtype" and not all(str(label).partition("/")[::2]):
        raise CatalogueError(f"{kind} {key!r}: {name} takes a method and a dtype, {name}/light/bf16")
    if entry.label == "steps" and not str(label).isdigit():
        raise CatalogueError(f"{kind} {key!r}: a window's label is its length in steps, {name}/64")
    return entry
