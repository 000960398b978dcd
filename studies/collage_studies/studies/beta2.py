"""β₂ from 0.9 to 0.9999 under several strategies: what each can hold, and whether the best β₂ moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from collage_monitor.seeds import Estimate
from collage_studies.recipe import Plan, Recipe
from collage_studies.results import by_plan, mean, mean_of, recipe_of
from collage_studies.study import Page, Plot, Points, Record, Study, Table, Trial
from collage_studies.trained import run_training
from collage_studies.words import estimate, listed

__all__ = ["STUDY"]

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
SEEDS: Final = (1, 2, 3)
RATE: Final = 5e-4
DECREMENT: Final = "state_decrement_ratio/exp_avg_sq"
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
    stuck = [
        f"{plan.name} (from β₂ = {min(held):g})"
        for plan, own in plans.items()
        if (held := [b for b in values if (e := mean_of(_at(own, b), DECREMENT, merged=True)) and e.value < 0.9])
    ]
    best = {plan.name: _best(found) for plan, found in losses.items()}
    verdict = f"The second moment is stuck under {listed(stuck)}. " if stuck else "No second moment is stuck. "
    verdict += f"The lowest mean loss is at {listed(f'β₂ = {beta2:g} for {name}' for name, beta2 in best.items())}."
    return Page(
        verdict,
        [
            Table([*head, "lowest at"], rows, "Last validation loss, mean over seeds and its 95 % interval:"),
            Table(head, decay, "How much of the second moment's decay arrives (1: all of it; below 0.9: stuck):"),
            _plot(losses),
        ],
        ["One model, one learning rate, 400 steps: at β₂ = 0.9999 the average does not see the end of its memory."],
    )


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
        curves[plan.name] = Points([x for x, _ in known], [entry.value for _, entry in known], low, high)
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
    question="At which β₂ does each strategy's second moment stop to decay, is there a best β₂, and does it move "
    "with precision?",
    method="The small GPT is trained at one learning rate with five values of β₂ under each strategy, from the "
    "same weights and batches for each of three seeds. `state_decrement_ratio/exp_avg_sq` says how much of the "
    "second moment's decay arrived.",
    trials=trials,
    run=run_training,
    page=page,
    compared=("validation_loss", DECREMENT),
)
