"""Which types of layers lose their updates first under plain bfloat16, and how many light and plus keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from collage_demo.recipe import Plan, Recipe

from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_studies.number_words import estimate, listed
from collage_studies.results import by_plan, mean_curve, recipe_of, stays_below_from
from collage_studies.study import MarkdownTable, Page, Plot, Record, Study, Trial
from collage_studies.training_trial import run_training

__all__ = ["STUDY"]

PLANS: Final = tuple(Plan(name, "bfloat16") for name in ("plain", "light", "plus"))
TYPES: Final = ("Embedding", "Linear", "LayerNorm")
SEEDS: Final = (1, 2, 3)
RATE: Final = 3e-4
LOST: Final = 0.95
"""Below this EDQ a type of layer counts as losing updates, as in the verdict."""
THIRDS: Final = ("first", "second", "last")
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
    evidence: list[str | MarkdownTable | Plot] = []
    rows = []
    for plan, own in by_plan(records).items():
        for name in CURVES:
            cells = [estimate(_third(own, name, third), ".3f") for third in range(3)]
            rows.append([plan.strategy, name.partition("@")[2], *cells])
    evidence.append(
        MarkdownTable(
            ["strategy", "type of layer", *(f"{word} third" for word in THIRDS)],
            rows,
            "The table shows EDQ in each third of the training, as a mean over measured steps and seeds.",
        )
    )
    evidence.append(_onsets(records))
    evidence += [_plot(plan, own) for plan, own in by_plan(records).items()]
    return Page(
        f"{_first(by_plan(records)[PLANS[0]])} {_kept(records)}",
        evidence,
        [
            "AdamW's steps have about the same size everywhere. But neighbouring bfloat16 numbers lie 32 to 64 "
            "times as far apart around 1, where LayerNorm's weights begin, as around 0.02, where most others "
            "begin. This explanation is arithmetic; the study did not vary it.",
            "A cosine ends at a rate of zero, where every storage loses updates. The last third shows how late "
            "each one begins to.",
            "Biases count with their module's type. Those of linear layers start at 0, where bfloat16 is finest.",
            "The study has one model and one learning rate. The order depends on how large weights are compared "
            "with their updates.",
        ],
    )


def _first(plain: Sequence[Record]) -> str:
    """EDQ early in the training of each type under plain bfloat16, and whether one type loses more than all
    others."""
    found = {name.partition("@")[2]: _of_seeds(plain, name, 0) for name in CURVES}
    means = {name: mean for name, own in found.items() if (mean := mean_over_seeds([each.value for each in own]))}
    if not means:
        return "Under plain bfloat16 nothing was measured in the first third of the training."
    ordered = sorted(means, key=lambda name: means[name].value)
    said = listed(f"{estimate(means[name], '.2f')} in {name} layers" for name in ordered)
    text = f"Under plain bfloat16, in the first third of the training, EDQ is {said}."
    apart = [difference(found[other], found[ordered[0]]) for other in ordered[1:]]
    if not apart or not all(gap and gap.low is not None and gap.low > 0 for gap in apart):
        return f"{text} The seeds do not show which type loses most."
    return f"{text} {ordered[0]} layers lose more than every other type, beyond chance."


def _kept(records: Sequence[Record]) -> str:
    """The lowest EDQ of any type under each other strategy, before the last third and in it."""
    said = []
    for plan, own in by_plan(records).items():
        if plan == PLANS[0]:
            continue
        cells = []
        for word, thirds in (("first two thirds", (0, 1)), ("last third", (2,))):
            found = [
                (each.value, name) for name in CURVES for third in thirds if (each := _third(own, name, third))
            ]
            if found:
                value, name = min(found)
                cells.append(f"{value:.3f} in the {word} ({name.partition('@')[2]})")
        said += [f"Under `{plan.strategy}` the lowest EDQ of any type is {listed(cells)}."] if cells else []
    return " ".join(said)


def _onsets(records: Sequence[Record]) -> MarkdownTable:
    """The measured step from which the mean EDQ of each type stays below `LOST`."""
    rows = []
    for plan, own in by_plan(records).items():
        cells = []
        for name in CURVES:
            points = mean_curve(own, name)
            step = stays_below_from(points.x, points.y, LOST)
            cells.append(f"{step:,.0f}" if step is not None else "never")
        rows.append([plan.strategy, *cells])
    return MarkdownTable(
        ["strategy", *TYPES], rows, f"The table shows the step from which EDQ (mean over seeds) stays below {LOST}."
    )


def _of_seeds(records: Sequence[Record], name: str, third: int) -> list[SeedValue]:
    """The mean of a curve over one third of the steps, for each run."""
    found = []
    for record in records:
        curve = record.curves[name]
        last = curve.steps[-1]
        chosen = [
            value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if value is not None and third < 3 * step / last <= third + 1
        ]
        seed = recipe_of(record).seed
        found += [SeedValue(sum(chosen) / len(chosen), None, seed)] if chosen else []
    return found


def _third(records: Sequence[Record], name: str, third: int) -> Estimate | None:
    return mean_over_seeds([found.value for found in _of_seeds(records, name, third)])


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
    short="In plain bfloat16 LayerNorm weights lose first, more than half of their descent in the first third of a "
    "training. Under `light` and `plus` all of it arrives until the last third, where the learning rate nears "
    "zero.",
    question="How much of the intended descent arrives at each step, in each type of layer, under plain bfloat16, "
    "light and plus? Which types lose first, and why?",
    method="The small GPT is trained along a cosine to zero under three strategies. EDQ is merged over the layers "
    "of each type of module. The EDQ of a third is the mean over its measured steps.",
    trials=trials,
    run=run_training,
    page=page,
    repeat_metrics=CURVES,
)
