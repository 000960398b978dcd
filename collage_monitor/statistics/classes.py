"""What became of each element: lost, distorted, faithful, idle or not finite."""

from __future__ import annotations

from collage_monitor.definitions import Array, Definition, Interval, Metric, ratio, sums

__all__ = ["DEFINITION"]


def _share_of_active(part: Array, elements: Array, nonfinite: Array, idle: Array) -> Array:
    return ratio(part, elements - nonfinite - idle)


def _share_of_finite(part: Array, elements: Array, nonfinite: Array) -> Array:
    return ratio(part, elements - nonfinite)


DEFINITION = Definition(
    statistics=(
        *sums("elements", nonfinite="θ, g, u or e not finite; left out of every sum and ratio."),
        *sums(
            "elements",
            needs=("intended",),
            idle="u = 0: nothing was intended.",
            stray="Idle elements with e ≠ 0.",
            lost="u ≠ 0 and e = 0: rounded away.",
            distorted="u ≠ 0, e ≠ 0 and |e − u| > ½|u|.",
            reversed="Distorted elements with e·u < 0.",
            faithful="u ≠ 0, e ≠ 0 and |e − u| ≤ ½|u|.",
            lost_visible="u ≠ 0 and eᵛ = 0: the registered parameter did not move.",
        ),
        *sums("elements", unchanged="Finite elements with eᵛ = 0, idle ones included."),
    ),
    metrics=(
        Metric(
            "lost_update_ratio",
            "Updates lost",
            "ratio",
            "lost / (elements − nonfinite − idle)",
            "Share of the intended updates that were rounded away in this step. "
            "Misjudges stochastic rounding, whose updates arrive in the mean.",
            needs=("lost", "elements", "nonfinite", "idle"),
            finish=_share_of_active,
            ideal=0.0,
            interval=Interval("lost", "active", share=True),
            exposed=True,
        ),
        Metric(
            "lost_visible_ratio",
            "Updates lost, visible",
            "ratio",
            "lost_visible / (elements − nonfinite − idle)",
            "Share of the intended updates that did not move the registered parameter.",
            needs=("lost_visible", "elements", "nonfinite", "idle"),
            finish=_share_of_active,
            ideal=0.0,
            interval=Interval("lost_visible", "active", share=True),
        ),
        Metric(
            "unchanged_ratio",
            "Unchanged",
            "ratio",
            "unchanged / (elements − nonfinite)",
            "The paper's imprecision. It counts idle elements as lost; for comparison with published figures only.",
            needs=("unchanged", "elements", "nonfinite"),
            finish=_share_of_finite,
        ),
    ),
)
