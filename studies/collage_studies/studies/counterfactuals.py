"""From one fp32 run: what plain bfloat16, light and stochastic rounding would keep; then the runs themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from collage_monitor.seeds import Estimate
from collage_studies.recipe import Plan, Recipe
from collage_studies.results import by_plan, mean_curve, mean_of, recipe_of
from collage_studies.study import Curve, Page, Plot, Record, Study, Table, Trial
from collage_studies.trained import run_training
from collage_studies.words import UNDEFINED, estimate

__all__ = ["STUDY"]

REFERENCE: Final = Plan("plain", "float32")
PREDICTED: Final = {
    Plan("plain", "bfloat16"): "counterfactual_edq_ratio/plain/bf16",
    Plan("light", "bfloat16"): "counterfactual_edq_ratio/light/bf16",
}
STOCHASTIC: Final = Plan("stochastic", "bfloat16")
PLANS: Final = (REFERENCE, *PREDICTED, STOCHASTIC)
RATES: Final = (1e-4, 3e-4, 1e-3)
SEEDS: Final = (1, 2, 3)
LOST: Final = 0.95
"""Below this EDQ a run counts as losing updates, as in the verdict."""
FORECAST: Final = PREDICTED[PLANS[1]]
SHAPE: Final = {"batch_size": 16, "length": 64, "layers": 2, "width": 64, "warm_up_steps": 40}
QUICK: Final = {"batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}
STEPS: Final = {"constant": 400, "cosine": 2000}


def trials(quick: bool) -> Sequence[Trial]:
    """Rates × seeds × (fp32 and three strategies); and fp32 and plain bfloat16 along a cosine to zero."""

    def trial(plan: Plan, rate: float, seed: int, schedule: str) -> Trial:
        shape = {**(QUICK if quick else SHAPE), "steps": 120 if quick else STEPS[schedule]}
        return Trial(
            name=f"{plan.name}, {schedule} {rate:g}, seed {seed}",
            plan=plan,
            recipe=Recipe(learning_rate=rate, schedule=schedule, seed=seed, **shape),  # type: ignore[arg-type]
            curves=("edq_ratio", FORECAST),
        )

    if quick:
        schedules = ("constant", "cosine")
        return [trial(plan, RATES[0], SEEDS[0], schedule) for schedule in schedules for plan in PLANS[:2]]
    constant = [trial(plan, rate, seed, "constant") for rate in RATES for seed in SEEDS for plan in PLANS]
    return [*constant, *(trial(plan, RATES[-1], seed, "cosine") for seed in SEEDS for plan in PLANS[:2])]


def page(records: Sequence[Record]) -> Page:
    """What was predicted beside what came, by rate and strategy; and when plain bfloat16 begins to lose."""
    constant = [record for record in records if recipe_of(record).schedule == "constant"]
    rows, misses = [], []
    for rate in dict.fromkeys(recipe_of(record).learning_rate for record in constant):
        own = by_plan([record for record in constant if recipe_of(record).learning_rate == rate])
        for plan, metric in PREDICTED.items():
            said, came = mean_of(own[REFERENCE], metric, merged=True), _measured(own, plan)
            rows.append([f"{rate:g}", plan.strategy, estimate(said), estimate(came), _difference(said, came)])
            misses += [abs(said.value - came.value)] if said and came else []
        came = _measured(own, STOCHASTIC)
        rows.append([f"{rate:g}", "stochastic", "1, in expectation", estimate(came), _difference(None, came)])
    head = ["learning rate", "strategy", "predicted from fp32", "measured", "measured less predicted"]
    evidence: list[str | Table | Plot] = [Table(head, rows, "EDQ, merged over all measured steps:")]
    verdict = f"An fp32 run predicts the EDQ of plain bfloat16 and light to within {max(misses):.3f} of what came."
    cosine = by_plan([record for record in records if recipe_of(record).schedule == "cosine"])
    if cosine:
        table, within = _onsets(cosine)
        evidence += [table, _plot(cosine)]
        verdict += f" When plain bfloat16 begins to lose along a cosine is predicted to within {within} steps."
    return Page(
        verdict,
        evidence,
        [
            "Counterfactuals are measured at one step in a hundred: a forecast knows no step more exactly.",
            "A strategy's own run soon differs from the fp32 run; a forecast is about the steps of the latter.",
        ],
    )


def _measured(own: Mapping[Plan, Sequence[Record]], plan: Plan) -> Estimate | None:
    return mean_of(own.get(plan, []), "edq_ratio", merged=True)


def _difference(said: Estimate | None, came: Estimate | None) -> str:
    if came is None:
        return UNDEFINED
    return f"{came.value - (said.value if said else 1.0):+.4f}"


def _onsets(own: Mapping[Plan, Sequence[Record]]) -> tuple[Table, int]:
    """The step from which on EDQ stays below `LOST`, as forecast and as it came, by seed; the largest miss."""
    rows, misses = [], []
    for forecast, came in zip(own[REFERENCE], own[PLANS[1]], strict=True):
        steps = _onset(forecast.curves[FORECAST]), _onset(came.curves["edq_ratio"])
        rows.append([str(recipe_of(came).seed), *(UNDEFINED if step is None else f"{step:,}" for step in steps)])
        misses += [abs(steps[0] - steps[1])] if steps[0] is not None and steps[1] is not None else []
    caption = f"The first measured step from which on EDQ stays below {LOST}, along a cosine to zero:"
    return Table(["seed", "predicted from fp32", "plain bfloat16"], rows, caption), max(misses, default=0)


def _onset(curve: Curve) -> int | None:
    found = None
    for step, value in reversed(list(zip(curve.steps, curve.values, strict=True))):
        if value is not None and value >= LOST:
            break
        found = step if value is not None else found
    return found


def _plot(own: Mapping[Plan, Sequence[Record]]) -> Plot:
    curves = {
        "predicted from fp32": mean_curve(own[REFERENCE], FORECAST),
        "plain bfloat16, measured": mean_curve(own[PLANS[1]], "edq_ratio"),
    }
    return Plot(
        file="counterfactuals.png",
        title="EDQ along a cosine to zero, mean over seeds",
        x="step",
        y="EDQ",
        curves=curves,
    )


STUDY: Final = Study(
    name="counterfactuals",
    title="Counterfactuals come true",
    question="Does one fp32 run predict what plain bfloat16, light and stochastic rounding keep of its updates, "
    "and the step at which plain bfloat16 begins to lose them?",
    method="`counterfactual_edq_ratio` says of an fp32 run's own steps what another strategy would have kept. The "
    "same model is then trained under these strategies, from the same weights and batches.",
    trials=trials,
    run=run_training,
    page=page,
)
