"""The class of each element: lost, distorted, faithful, idle or not finite.

The agent measures it in `collage_agent/stats/classes.py`; formulas are those of `docs/metrics.md`, and names are
fixed (`tests/agent/stats/test_classes.py`).
"""

from __future__ import annotations

from collage_monitor.definitions import Array, Definition, Interval, Metric, active_elements, ratio, sums

__all__ = ["DEFINITION", "share_known", "share_of_active", "share_of_finite"]


_FEWEST = ("elements", "nonfinite", "idle")
_CLASSES = ("lost", "distorted", "faithful")


def share_of_active(part: Array, elements: Array, nonfinite: Array, idle: Array, *classes: Array) -> Array:
    """part / active elements."""
    return ratio(part, active_elements(elements, nonfinite, idle, *classes))


def share_known(
    lost: Array, distorted: Array, faithful: Array, idle: Array, elements: Array, nonfinite: Array
) -> Array:
    """(lost + distorted + faithful + idle) / (elements − nonfinite)."""
    return ratio(lost + distorted + faithful + idle, elements - nonfinite)


def share_of_finite(part: Array, elements: Array, nonfinite: Array) -> Array:
    """part / (elements − nonfinite)."""
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
            "share",
            "lost / (lost + distorted + faithful)",
            "Share of the intended updates that were rounded away in this step. "
            "Misjudges stochastic rounding, whose updates arrive in the mean.",
            needs=("lost", *_FEWEST),
            optional=_CLASSES,
            finish=share_of_active,
            ideal=0.0,
            interval=Interval("lost", "active", share=True),
            exposed=True,
        ),
        Metric(
            "lost_visible_ratio",
            "Updates lost, visible",
            "share",
            "lost_visible / (lost + distorted + faithful)",
            "Share of the intended updates that did not move the registered parameter.",
            needs=("lost_visible", *_FEWEST),
            optional=_CLASSES,
            finish=share_of_active,
            ideal=0.0,
            interval=Interval("lost_visible", "active", share=True),
        ),
        Metric(
            "measured_ratio",
            "Elements with a known u",
            "share",
            "(lost + distorted + faithful + idle) / (elements − nonfinite)",
            "Share of the elements of stepped layers whose intended update is known. Of the others only what "
            "changed is known: no ratio counts them.",
            needs=(*_CLASSES, "idle", "elements", "nonfinite"),
            finish=share_known,
            ideal=1.0,
        ),
        Metric(
            "unchanged_ratio",
            "Unchanged",
            "share",
            "unchanged / (elements − nonfinite)",
            "The paper's imprecision. It counts idle elements as lost; for comparison with published figures only.",
            needs=("unchanged", "elements", "nonfinite"),
            finish=share_of_finite,
        ),
    ),
)
