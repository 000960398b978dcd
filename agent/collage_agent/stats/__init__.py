"""How each statistic is measured: pure functions from a view of the step to sums, still on the device.

A module here measures what the module of the same name in `collage_monitor.statistics` defines. What is measured
at every measured step has a function from a `StepView` to `Sums`; other packages add theirs through the entry-point
group `collage_agent.statistics`, under the name of their definition. Nothing here reads a value back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from collage_agent.stats import classes, counterfactuals, edq, kept, updates
from collage_agent.stats.view import MovingAverages, StepView, Sums
from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions
from collage_monitor.statistics.catalogue import DEFINITIONS

__all__ = ["MEASURES", "Measure", "MovingAverages", "StepView", "Sums", "measures_of"]

Measure = Callable[[StepView], Sums | Mapping[str, Tensor]]
"""Sums by statistic key; a plain mapping holds sums by block, fp64 [blocks]."""

_OWN: Final[Mapping[str, Measure]] = {
    "norms": edq.measure_norms,
    "edq": edq.measure_edq,
    "classes": classes.measure,
    "updates": updates.measure,
    "states": kept.measure_states,
    "decay": kept.measure_decay,
    "residuals": kept.measure_residuals,
    "counterfactuals": counterfactuals.measure,
}


def measures_of(own: Mapping[str, Measure], added: Mapping[str, Any]) -> dict[str, Measure]:
    """How statistics are measured, by the name of their definition, those that other packages add last.

    Raises:
        CatalogueError: what was added cannot be called, or has no definition under its name.
    """
    for name, measure in added.items():
        if not callable(measure) or name in own:
            raise CatalogueError(f"collage_agent.statistics {name!r} must be a function, under a name of its own")
        if name not in DEFINITIONS:
            raise CatalogueError(
                f"collage_agent.statistics {name!r} has no definition: add one to collage_monitor.statistics"
            )
    return {**own, **added}


MEASURES: Final = measures_of(_OWN, extensions("collage_agent.statistics"))
