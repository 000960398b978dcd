"""β₂ from 0.9 to 0.9999 under several strategies: which values each can hold, and whether the best one moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from collage_demo.recipe import Plan, Recipe

from collage_monitor.seeds import Estimate, SeedValue, difference
from collage_studies.number_words import estimate, listed
from collage_studies.results import by_plan, gaps, mean, mean_of, recipe_of
from collage_studies.study import MarkdownTable, Page, Plot, PlotCurve, Record, Study, Trial
from collage_studies.training_trial import run_training

__all__ = ["NOTICEABLE_GAP", "STUDY"]

BETA2: Final = (0.9, 0.95, 0.99, 0.999, 0.9999)
PLANS: Final = (
    Plan("plain", "float32"),
    Plan("plain", "bfloat16"),
    Plan("stochastic", "bfloat16"),
    Plan("light", "bfloat16"),
    Plan("plus", "bfloat16"),
    Plan("split-master-16bit", "bfloat16"),
    Plan("split-master", "bfloat16"),
)
REFERENCE: Final = PLANS[0]
SEEDS: Final = (1, 2, 3)
RATE: Final = 5e-4
DECREMENT: Final = "state_decrement_ratio/exp_avg_sq"
STUCK: Final = 0.9
"""A second moment that decays by less than this share counts as stuck, as in the verdict."""
NOTICEABLE_GAP: Final = 0.001
"""Nats of validation loss. Chosen after seeing the gaps: one of +0.0001 excludes 0 but is too small to mention."""
SHAPE: Final = {"steps": 400, "batch_size": 16, "length": 64, "layers": 2, "width": 64, "warm_up_steps": 40}
QUICK: Final = {"steps": 40, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}


def trials(quick: bool) -> Sequence[Trial]:
    """Seeds × plans × β₂; quick: one seed, fp32 and light, two values of β₂."""
    plans = (PLANS[0], PLANS[3]) if quick else PLANS
    values = (BETA2[1], BETA2[3]) if quick else BETA2
    shape = QUICK if quick else SHAPE
    return [
        Trial(
            name=f"{plan.name}, β₂ {beta2:g}, seed {seed}",
            plan=plan,
            recipe=Recipe(betas=(0.9, beta2), learning_rate=RATE, seed=seed, **shape),  # type: ignore[arg-type]
            curves=("validation_loss", DECREMENT),
        )
        for seed in SEEDS[: 1 if quick else None]
        for plan in plans
        for beta2 in values
    ]


def page(records: Sequence[Record]) -> Page:
    """Losses and the second moment's decay by plan and β₂."""
    plans = by_plan(records)
    values = sorted({recipe_of(record).betas[1] for record in records})
    losses = {plan: {beta2: _loss(own, beta2) for beta2 in values} for plan, own in plans.items()}
    decay = [
        [plan.name, *(mean(_at(own, b), DECREMENT, ".3f", merged=True) for b in values)]
        for plan, own in plans.items()
    ]
    head = ["strategy", *(f"β₂ = {beta2:g}" for beta2 in values)]
    rows = [
        [plan.name, *(estimate(found[b]) for b in values), f"{_best(found):g}"] for plan, found in losses.items()
    ]
    gap = {plan: {beta2: _gap(plans, plan, beta2) for beta2 in values} for plan in plans if plan != REFERENCE}
    stuck = [
        f"{plan.name} (from β₂ = {min(held):g})"
        for plan, own in plans.items()
        if (held := [b for b in values if (e := mean_of(_at(own, b), DECREMENT, merged=True)) and e.value < STUCK])
    ]
    verdict = f"The second moment is stuck under {listed(stuck)}." if stuck else "No second moment is stuck."
    lowest = _lowest(plans, losses)
    return Page(
        f"{verdict} {lowest} {_worse(gap)}",
        [
            MarkdownTable(
                head,
                decay,
                f"The table shows the share of the second moment's decay that arrives. Below {STUCK} it "
                "counts as stuck.",
            ),
            MarkdownTable(
                [*head, "lowest at"],
                rows,
                "The table shows the last validation loss: the mean over seeds and its 95 % interval.",
            ),
            MarkdownTable(
                head,
                [[plan.name, *(estimate(found[b], "+.4f") for b in values)] for plan, found in gap.items()],
                "The table shows the gap: the last validation loss less that of fp32 with the same β₂ and seed.",
            ),
            _plot(losses),
        ],
        [
            "The study has one model, one learning rate and 400 steps. At β₂ = 0.9999 an average remembers more "
            "steps than that.",
            "With three seeds, an interval that includes 0 does not prove that there is no gap. Among the "
            f"{_count(gap)} intervals, some exclude 0 by chance alone.",
            f"The answer names gaps of {NOTICEABLE_GAP:g} or more. We chose this bound after seeing the gaps; the "
            "table has all of them.",
            "A stuck second moment stays as large as it once was, so steps become too small. Its cost depends on "
            "how far gradients fall, which the study did not vary.",
        ],
    )


def _gap(plans: Mapping[Plan, Sequence[Record]], plan: Plan, beta2: float) -> Estimate | None:
    return gaps([*_at(plans[plan], beta2), *_at(plans.get(REFERENCE, []), beta2)], REFERENCE).get(plan)


def _count(gap: Mapping[Plan, Mapping[float, Estimate | None]]) -> int:
    return sum(len(found) for found in gap.values())


def _lowest(plans: Mapping[Plan, Sequence[Record]], losses: Mapping[Plan, dict[float, Estimate | None]]) -> str:
    """Where each plan's mean loss is lowest, which other β₂ are no different beyond chance, and which all share."""
    alike = {}
    for plan, found in losses.items():
        best = _best(found)
        gap = {
            b: difference(_seeds(_at(plans[plan], b)), _seeds(_at(plans[plan], best))) for b in found if b != best
        }
        alike[plan] = [best, *(b for b, e in gap.items() if e and (e.low is None or e.low <= 0))]
    shared = sorted(set.intersection(*(set(own) for own in alike.values())))
    (best, *more) = dict.fromkeys(own[0] for own in alike.values())
    if not more:
        others = [f"{b:g}" for b in shared if b != best]
        text = f"The mean loss is lowest at β₂ = {best:g} under every strategy"
        text += f", with no difference shown at {listed(others)}" if others else ""
        return f"{text}. So the best β₂ is not shown to move with precision."
    said = listed(
        f"{own[0]:g} under {plan.name}"
        + (f" (no difference shown at {listed(f'{b:g}' for b in own[1:])})" if own[1:] else "")
        for plan, own in alike.items()
    )
    text = f"The mean loss is lowest at β₂ = {said}."
    if shared:
        return (
            f"{text} The best β₂ is not shown to move with precision: under every strategy "
            f"{listed(f'{b:g}' for b in shared)} is lowest, or no different from the lowest beyond chance."
        )
    return f"{text} No β₂ is best, within chance, under all strategies: the best one moves with precision."


def _worse(gap: Mapping[Plan, Mapping[float, Estimate | None]]) -> str:
    """Where a strategy ends worse than fp32 with the same β₂, beyond chance and by `NOTICEABLE_GAP` or more."""
    said = []
    for plan, found in gap.items():
        worse = [
            f"{e.value:+.4f} at {b:g}"
            for b, e in found.items()
            if e and e.low is not None and e.low > 0 and e.value >= NOTICEABLE_GAP
        ]
        said += [f"`{plan.strategy}` ({listed(worse)})"] if worse else []
    if not said:
        return f"No strategy is shown to end worse than fp32 with the same β₂ by {NOTICEABLE_GAP:g} or more."
    return (
        f"{listed(said)} {'ends' if len(said) == 1 else 'end'} worse than fp32 with the same β₂, beyond chance "
        f"and by {NOTICEABLE_GAP:g} or more."
    )


def _seeds(records: Sequence[Record]) -> list[SeedValue]:
    return [
        SeedValue(value, None, recipe_of(record).seed)
        for record in records
        if (value := record.values.get("validation_loss")) is not None
    ]


def _at(records: Sequence[Record], beta2: float) -> list[Record]:
    return [record for record in records if recipe_of(record).betas[1] == beta2]


def _loss(records: Sequence[Record], beta2: float) -> Estimate | None:
    return mean_of(_at(records, beta2), "validation_loss")


def _best(losses: dict[float, Estimate | None]) -> float:
    return min((found.value, beta2) for beta2, found in losses.items() if found)[1]


def _plot(losses: dict[Plan, dict[float, Estimate | None]]) -> Plot:
    curves = {}
    for plan, found in losses.items():
        known = [(1 - beta2, entry) for beta2, entry in found.items() if entry]
        low = [entry.value if entry.low is None else entry.low for _, entry in known]
        high = [entry.value if entry.high is None else entry.high for _, entry in known]
        curves[plan.name] = PlotCurve([x for x, _ in known], [entry.value for _, entry in known], low, high)
    return Plot(
        file="beta2.png",
        title="Validation loss by β₂ (band: 95 % interval over seeds)",
        x="1 − β₂",
        y="validation loss, nats a byte",
        curves=curves,
        x_scale="log",
    )


STUDY: Final = Study(
    name="beta2",
    title="Which β₂ a strategy can hold",
    short="From β₂ = 0.999 on, the second moment of plain bfloat16 and of `light` never decays. The loss is "
    "lowest at β₂ = 0.95 under every strategy, so there is no sign that precision moves the best β₂.",
    question="At which β₂ does each strategy's second moment stop decaying? Is there a best β₂, and does it move "
    "with precision?",
    method="The small GPT is trained at one learning rate with five values of β₂ under each strategy. Three seeds "
    "give all of them the same weights and batches. `state_decrement_ratio/exp_avg_sq` is the share of the second "
    "moment's decay that arrived.",
    trials=trials,
    run=run_training,
    page=page,
    repeat_metrics=("validation_loss", DECREMENT),
)
