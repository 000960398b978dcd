"""Records of trainings that nobody ran: their numbers are given."""

from dataclasses import replace

from collage_demo.recipe import Plan, Recipe
from collage_studies.study import Curve, Record, Trial

__all__ = ["FP32", "LIGHT", "PLAIN", "RECIPE", "record_of", "training"]

FP32, PLAIN, LIGHT = Plan("plain", "float32"), Plan("plain", "bfloat16"), Plan("light", "bfloat16")
RECIPE = Recipe(steps=30)


def record_of(trial, **fields):
    return Record(trial=trial, versions={"torch": "2"}, cpu_seconds=1.5, run_id=f"run-{trial.name}", **fields)


def training(plan, seed=1, *, recipe=RECIPE, loss=None, settings=None, values=None, curves=None, **fields):
    """curves: the points of each at steps 10, 20, 30."""
    trial = Trial(
        name=f"{plan.name}, seed {seed}", plan=plan, recipe=replace(recipe, seed=seed), settings=settings or {}
    )
    values = dict(values or {}) | ({} if loss is None else {"validation_loss": loss})
    return record_of(
        trial,
        values=values,
        curves={name: Curve([10, 20, 30], points) for name, points in (curves or {}).items()},
        **fields,
    )
