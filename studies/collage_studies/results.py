"""Statistics that pages share: records by plan, means over seeds, gaps to a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_studies.recipe import Plan, Recipe
from collage_studies.study import Record
from collage_studies.words import UNDEFINED

__all__ = ["by_plan", "gaps", "mean", "mean_of", "recipe_of"]


def recipe_of(record: Record) -> Recipe:
    """The recipe of a training's record."""
    assert record.trial.recipe is not None
    return record.trial.recipe


def by_plan(records: Sequence[Record]) -> Mapping[Plan, list[Record]]:
    """The records of trainings by their plan, in the order of the records."""
    found: dict[Plan, list[Record]] = {}
    for record in records:
        if record.trial.plan is not None:
            found.setdefault(record.trial.plan, []).append(record)
    return found


def mean_of(records: Sequence[Record], name: str, *, merged: bool = False) -> Estimate | None:
    """The mean over runs, with its interval, of a value or of a merged metric; runs without it are left out."""
    found = [(record.merged if merged else record.values).get(name) for record in records]
    return mean_over_seeds([value for value in found if value is not None])


def mean(records: Sequence[Record], name: str, form: str = ".3g", *, merged: bool = False) -> str:
    """As `mean_of`, as text without its interval."""
    found = mean_of(records, name, merged=merged)
    return UNDEFINED if found is None else format(found.value, form)


def gaps(records: Sequence[Record], reference: Plan) -> Mapping[Plan, Estimate | None]:
    """Last validation loss less the reference's, seed by seed, of every other plan, in nats a byte."""
    losses = {plan: _losses(own) for plan, own in by_plan(records).items()}
    return {plan: difference(own, losses.get(reference, [])) for plan, own in losses.items() if plan != reference}


def _losses(records: Sequence[Record]) -> list[SeedValue]:
    return [
        SeedValue(value, None, recipe_of(record).seed)
        for record in records
        if (value := record.values.get("validation_loss")) is not None
    ]
