"""How each statistic is measured: pure functions from a view of the step to sums, still on the device.

A module here measures what the module of the same name in `collage_monitor.statistics` defines; the other modules
hold what several of them use. Each statistic of a measured step has a function from a `StepView` to `Sums`. Other
packages add theirs through the entry-point group `collage_agent.statistics`, under the name of their definition.
Nothing here reads a value back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from collage_agent.error_guard import reraise_in_tests
from collage_agent.stats import casts, classes, counterfactuals, edq, optimizer_state, update_histogram
from collage_agent.stats.step_view import MovingAverages, StepView, Sums
from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions
from collage_monitor.statistics.catalogue import DEFINITIONS, split_key

__all__ = [
    "MEASURES",
    "Measure",
    "MovingAverages",
    "OPTIONAL",
    "OWN",
    "StepView",
    "Sums",
    "failures",
    "measures_of",
]

Measure = Callable[[StepView], Sums | Mapping[str, Tensor]]
"""Sums by statistic key; a plain mapping holds sums by block, fp64 [blocks]."""

OWN: Final[Mapping[str, Measure]] = {
    "norms": edq.measure_norms,
    "edq": edq.measure_edq,
    "classes": classes.measure,
    "updates": update_histogram.measure,
    "states": optimizer_state.measure_states,
    "decay": optimizer_state.measure_decay,
    "residuals": optimizer_state.measure_residuals,
    "counterfactuals": counterfactuals.measure,
    "casts": casts.measure,
}

OPTIONAL: Final[Mapping[str, str]] = {
    "decay": "decay",
    "residuals": "residual",
    "counterfactuals": "scales",
    "casts": "copies",
}
"""Measures of what not every view has, and where it stands in one."""


class AddedMeasure:
    """A measure of another package. Once it fails it is switched off in this process, alone, with one log line."""

    def __init__(self, name: str, measure: Measure) -> None:
        self.failure: str | None = None
        self._name = name
        self._measure = measure
        self._statistics = {entry.name for entry in DEFINITIONS[name].statistics}

    def __call__(self, step: StepView) -> Sums:
        if self.failure is not None:
            return Sums()
        try:
            found = self._measure(step)
            sums = found if isinstance(found, Sums) else Sums(found)
            self._check(sums.by_block, len(step.block_elements))
            self._check(sums.by_tensor, step.tensors)
            return sums
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reraise_in_tests(error)
            self.failure = f"statistic {self._name!r} is switched off, its measure failed: {error}"
            logging.getLogger("collage_agent").warning("%s; all else goes on", self.failure, exc_info=error)
            return Sums()

    def _check(self, sums: Mapping[str, Tensor], size: int) -> None:
        for key, values in sums.items():
            if split_key(key)[0] not in self._statistics:
                raise ValueError(f"{key!r} is no statistic of its definition")
            if tuple(values.shape) != (size,):
                raise ValueError(f"{key!r} has shape {tuple(values.shape)}, not ({size},)")


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
    return {**own, **{name: AddedMeasure(name, measure) for name, measure in added.items()}}


def failures() -> list[str]:
    """Sentences about the measures that were switched off."""
    return [
        measure.failure for measure in MEASURES.values() if isinstance(measure, AddedMeasure) and measure.failure
    ]


MEASURES: Final = measures_of(OWN, extensions("collage_agent.statistics"))
