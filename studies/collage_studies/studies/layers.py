"""Which types of layers lose their updates first under plain bfloat16, and what light and plus keep of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from collage_monitor.seeds import Estimate, mean_over_seeds
from collage_studies.recipe import Plan, Recipe
from collage_studies.results import by_plan, mean_curve
from collage_studies.study import Page, Plot, Record, Study, Table, Trial
from collage_studies.trained import run_training
from collage_studies.words import estimate, listed

__all__ = ["STUDY"]

PLANS: Final = tuple(Plan(name, "bfloat16") for name in ("plain", "light", "plus"))
TYPES: Final = ("Embedding", "Linear", "LayerNorm")
SEEDS: Final = (1, 2, 3)
RATE: Final = 3e-4
CURVES: Final = tuple(f"edq_ratio@{name}" for name in TYPES)
SHAPE: Final = {"steps": 600, "batch_size": 16, "length": 64, "layers": 2, "width": 64, "warm_up_steps": 40}
QUICK: Final = {"steps": 40, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}


def trials(quick: bool) -> Sequence[Trial]:
    """Seeds × plain, light and plus, along a cosine to zero; quick: one seed, plain and plus."""
    shape = QUICK if quick else SHAPE
    return [
        Trial(
            name=f"{plan.name}, seed {seed}",
            plan=plan,
            recipe=Recipe(learning_rate=RATE, schedule="cosine", seed=seed, **shape),  # type: ignore[arg-type]
            curves=CURVES,
        )
        for seed in SEEDS[: 1 if quick else None]
        for plan in (PLANS[:: 2 if quick else 1])
    ]


def page(records: Sequence[Record]) -> Page:
    """EDQ by type of layer early, in the middle and late in the training, and its curves."""
    evidence: list[str | Table | Plot] = []
    rows = []
    for plan, own in by_plan(records).items():
        for name in CURVES:
            cells = [estimate(_third(own, name, third), ".3f") for third in range(3)]
            rows.append([plan.strategy, name.partition("@")[2], *cells])
    evidence.append(
        Table(
            ["strategy", "type of layer", "first third", "second third", "last third"],
            rows,
            "EDQ, mean over a third's points and over seeds:",
        )
    )
    evidence += [_plot(plan, own) for plan, own in by_plan(records).items()]
    plain = by_plan(records)[PLANS[0]]
    first = {name.partition("@")[2]: _third(plain, name, 0) for name in CURVES}
    order = sorted((found.value, name) for name, found in first.items() if found)
    verdict = "Under plain bfloat16, in the first third of the training, of the intended descent arrive "
    verdict += listed(f"{value:.0%} in {name} layers" for value, name in order) + ". "
    verdict += (
        "LayerNorm loses most: its weights are the nearest to 1, where the gap between neighbours is some fifty "
        "times that around 0.02."
        if order and order[0][1] == "LayerNorm"
        else "Those with weights near 1 (LayerNorm) are not those that lose most."
    )
    return Page(
        verdict,
        evidence,
        [
            "Biases are part of their module's type: those of linear layers start at 0, where bfloat16 is finest.",
            "One model and one learning rate; the order depends on the size of weights against that of updates.",
        ],
    )


def _third(records: Sequence[Record], name: str, third: int) -> Estimate | None:
    """The mean over runs of a curve's mean over a third of its steps."""
    found = []
    for record in records:
        curve = record.curves[name]
        last = curve.steps[-1]
        chosen = [
            value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if value is not None and third < 3 * step / last <= third + 1
        ]
        found += [sum(chosen) / len(chosen)] if chosen else []
    return mean_over_seeds(found)


def _plot(plan: Plan, records: Sequence[Record]) -> Plot:
    curves = {name.partition("@")[2]: mean_curve(records, name) for name in CURVES}
    return Plot(
        file=f"layers-{plan.strategy}.png",
        title=f"EDQ by type of layer: {plan.strategy}, mean over seeds",
        x="step",
        y="EDQ",
        curves=curves,
    )


STUDY: Final = Study(
    name="layers",
    title="Which layers lose first",
    question="At each step, how much of the intended descent arrives in each type of layer under plain bfloat16, "
    "light and plus? Which types lose first, and why?",
    method="The small GPT is trained along a cosine to zero under three strategies. EDQ is merged over the layers "
    "of each type of module; a third's EDQ is the mean over its points.",
    trials=trials,
    run=run_training,
    page=page,
    compared=CURVES,
)
