"""Averages of the weights: how much of their own updates arrives, which elements ever move, and how far fp64 has
moved.

An average a ← a + (1 − d)(θ − a) intends u = (1 − d)(θ − a) of its stored a and θ, and moves by e. Beside it an
fp64 average of the same θ is carried along.
"""

from __future__ import annotations

from typing import Final

from collage_monitor.definitions import (
    Definition,
    Metric,
    Statistic,
    as_is,
    noise_ratio,
    ratio,
    root_ratio,
    rounding_variance,
    sums,
)

__all__ = ["DEFINITION", "KEYS"]


def _since(name: str, unit: str, text: str) -> Statistic:
    return Statistic(name, "sum", "last", unit, text)


DEFINITION = Definition(
    statistics=(
        Statistic(
            "average_updates",
            "max",
            "last",
            "updates",
            "Updates of the average since it is watched, or was last set to the weights: raw.",
            raw=True,
        ),
        *sums(
            "weight²",
            average_squared_sum="Σ u², u = (1 − d)(θ − a): what an update of the average intends.",
            average_effective_sum="Σ u·e, e = what the stored average moves by.",
        ),
        rounding_variance("average_rounding_variance", "weight⁴", "u·e", "u²"),
        *sums(
            "elements",
            average_active="Elements of the average with u ≠ 0.",
            average_lost="u ≠ 0 and e = 0.",
        ),
        _since("average_elements", "elements", "Elements of the average that are finite."),
        _since("average_moved", "elements", "Those that have ever moved since."),
        Statistic("average_nonfinite", "sum", "max", "elements", "Elements of the average that are not finite."),
        _since("average_stored_squared_sum", "weight²", "Σ E², E = what the stored average has moved by since."),
        _since("average_exact_squared_sum", "weight²", "Σ O², O = what the fp64 average has moved by since."),
        _since("average_drift_squared_sum", "weight²", "Σ (E − O)²"),
    ),
    metrics=(
        Metric(
            "average_edq_ratio",
            "EDQ of the average",
            "ratio",
            "Σ u·e / Σ u², u = (1 − d)(θ − a)",
            "Share of what the updates of an average of the weights intend that arrives in the stored average.",
            needs=("average_effective_sum", "average_squared_sum"),
            finish=ratio,
            ideal=1.0,
        ),
        Metric(
            "average_edq_noise_ratio",
            "EDQ of the average, noise of rounding",
            "ratio",
            "√average_rounding_variance / Σ u²",
            "Standard error of average_edq_ratio where the average is rounded at random.",
            needs=("average_rounding_variance", "average_squared_sum"),
            finish=noise_ratio,
            ideal=0.0,
        ),
        Metric(
            "average_lost_ratio",
            "Updates of the average lost",
            "share",
            "average_lost / average_active",
            "Share of the average's updates that are rounded away.",
            needs=("average_lost", "average_active"),
            finish=ratio,
            ideal=0.0,
        ),
        Metric(
            "average_moved_ratio",
            "Elements of the average that ever moved",
            "share",
            "average_moved / average_elements",
            "Share of the average's elements that have moved since it is watched, or was last set to the weights.",
            needs=("average_moved", "average_elements"),
            finish=ratio,
        ),
        Metric(
            "average_displacement_ratio",
            "Displacement of the average",
            "ratio",
            "√(Σ E² / Σ O²)",
            "How far the stored average has come, in units of an fp64 average's way. Compare at equal updates.",
            needs=("average_stored_squared_sum", "average_exact_squared_sum"),
            finish=root_ratio,
            ideal=1.0,
        ),
        Metric(
            "average_drift_ratio",
            "Drift of the average",
            "ratio",
            "√(Σ (E − O)² / Σ O²)",
            "Distance from where an fp64 average stands, in units of its displacement.",
            needs=("average_drift_squared_sum", "average_exact_squared_sum"),
            finish=root_ratio,
            ideal=0.0,
        ),
        Metric(
            "average_nonfinite",
            "Non-finite elements of the average",
            "elements",
            "average_nonfinite",
            "Elements of an average of the weights that are NaN or infinite.",
            needs=("average_nonfinite",),
            finish=as_is,
            ideal=0.0,
        ),
        Metric(
            "average_updates",
            "Updates of the average",
            "steps",
            "average_updates",
            "Updates of the average since it is watched, or was last set to the weights.",
            needs=("average_updates",),
            finish=as_is,
        ),
    ),
)
KEYS: Final = tuple(entry.name for entry in DEFINITION.statistics)
