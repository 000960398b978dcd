"""Counts that are shown as they are: the sizes of the sample, non-finite values, and the classes.

The agent counts them in `step/totals.py`. They tell how much a number rests on, so they are never scaled from the
sample to the tensor where the help says raw.
"""

from __future__ import annotations

from collage_monitor.definitions import Definition, Metric, Statistic, as_is, sums
from collage_monitor.statistics import classes

__all__ = ["DEFINITION", "REPLICAS"]

_SIZES = sums(
    "elements",
    raw=True,
    elements="Elements of the tensor shard.",
    sampled="Elements really looked at: raw, never scaled up.",
)
_SHOWN = ("nonfinite", "idle", "stray", "lost", "distorted", "reversed", "faithful")


def _count(entry: Statistic) -> Metric:
    return Metric(
        entry.name, entry.name, "elements", f"Σ {entry.name}", entry.help, needs=(entry.name,), finish=as_is
    )


DEFINITION = Definition(
    statistics=(
        Statistic("measured_steps", "max", "sum", "steps", "Measured steps merged into the totals.", raw=True),
        *_SIZES,
        Statistic(
            "active_blocks",
            "sum",
            "max",
            "blocks",
            "Sampled blocks with some u ≠ 0: raw, never scaled up.",
            needs=("intended",),
            raw=True,
        ),
        *sums("elements", needs=("gradient",), nonfinite_gradients="Elements whose gradient is not finite."),
        Statistic("nonfinite_parameters", "sum", "max", "elements", "Elements whose weight is not finite."),
    ),
    metrics=(
        Metric(
            "nonfinite_grads",
            "Non-finite gradients",
            "elements",
            "Σ nonfinite_gradients",
            "Gradient elements that are NaN or infinite.",
            needs=("nonfinite_gradients",),
            finish=as_is,
            ideal=0.0,
        ),
        Metric(
            "nonfinite_params",
            "Non-finite weights",
            "elements",
            "max nonfinite_parameters",
            "Weights that are NaN or infinite.",
            needs=("nonfinite_parameters",),
            finish=as_is,
            ideal=0.0,
        ),
        *(
            _count(entry)
            for entry in (*_SIZES, *classes.DEFINITION.statistics)
            if entry in _SIZES or entry.name in _SHOWN
        ),
    ),
)

REPLICAS = Definition(
    statistics=(
        Statistic(
            "replica_checksum",
            "sum",
            "last",
            "1",
            "Of the sampled weights' bits after the step, below 2³² a tensor: raw, equal in replicas.",
            raw=True,
        ),
        Statistic(
            "replica_checksum_elements", "sum", "last", "elements", "Elements that it was made of: raw.", raw=True
        ),
    )
)
"""Checksums of replicated weights, for the server to compare. No metric is made of them."""
