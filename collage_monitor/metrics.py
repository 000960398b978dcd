"""The metric catalogue: every statistic that travels, every metric made from it, every scalar with a reserved name.

A new metric goes into a module of `collage_monitor.statistics`, a new scalar below.

A *statistic* is an estimated total that a worker sends; it declares how it merges over shards and over steps.
A *metric* is a number that readers see; it is made from statistics. Both are defined under
`collage_monitor.statistics`, a family of diagnostics a file. A *scalar* is logged by the training loop or by the
agent about itself.
A key is NAME or NAME/label (`state_decrement_ratio/exp_avg_sq`); it is the same in code, wire, route and column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from collage_monitor.definitions import HISTOGRAM_LABELS, HISTOGRAM_OCTAVES, Metric, Statistic
from collage_monitor.statistics.catalogue import METRICS, STATISTICS, is_metric, metric, split_key, statistic

__all__ = [
    "HISTOGRAM_LABELS",
    "HISTOGRAM_OCTAVES",
    "METRICS",
    "Metric",
    "SCALARS",
    "STATE_RATIOS",
    "STATISTICS",
    "Scalar",
    "Statistic",
    "is_metric",
    "metric",
    "preferred_state",
    "split_key",
    "statistic",
]

_STATE: Final = "state_decrement_ratio"
_SECOND_MOMENT: Final = f"{_STATE}/exp_avg_sq"
STATE_RATIOS: Final = (_STATE, "state_increment_ratio")
"""What averages should shed and did, and what sums should take and did; labelled by optimizer state."""


def preferred_state(keys: Iterable[str]) -> str | None:
    """The state decrement to show where there is room for one: that of exp_avg_sq, else the first by name."""
    labelled = [key for key in keys if key.startswith(f"{_STATE}/")]
    return _SECOND_MOMENT if _SECOND_MOMENT in labelled else min(labelled, default=None)


@dataclass(frozen=True)
class Scalar:
    """One logged number with a reserved meaning. `source` is "loop" (the user's), "agent" (about itself) or
    "server" (made from others)."""

    name: str
    title: str
    unit: str
    source: Literal["loop", "agent", "server"]
    help: str


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
        "Weights, optimizer states and gradients, from where they lie in memory. With more than 2,000 layers: from "
        "the second measured step on.",
    ),
    Scalar("agent_cpu_seconds", "Agent CPU", "seconds", "agent", "CPU that the agent has used since attach."),
    Scalar(
        "agent_overhead_ratio",
        "Agent overhead",
        "share",
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
        "Times that weights were written between two steps or a step raised, so that the oracle attached again, "
        "since attach.",
    ),
    Scalar(
        "external_writes",
        "External writes",
        "writes",
        "agent",
        "How often one of our optimizers found a weight changed by somebody else, and dropped what it kept "
        "beside it.",
    ),
    Scalar(
        "expectations_broken",
        "Expectations broken",
        "expectations",
        "agent",
        "Expectations of watch(expect=…) that do not hold in this launch.",
    ),
    Scalar(
        "resume_losses",
        "Lost at the resume",
        "kinds",
        "agent",
        "Kinds of what an optimizer keeps that did not come through a resume; absent where all did.",
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
