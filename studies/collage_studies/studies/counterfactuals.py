"""What plain bfloat16, light and stochastic rounding keep, as one fp32 run predicts it and as their runs show
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from collage_demo.recipe import Plan, Recipe

from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_studies.number_words import estimate, listed
from collage_studies.results import by_plan, mean_curve, recipe_of, stays_below_from
from collage_studies.study import Curve, MarkdownTable, Page, Plot, Record, Study, Trial
from collage_studies.training_trial import run_training

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
    """Predicted and measured EDQ by rate and strategy, and when plain bfloat16 begins to lose."""
    constant = [record for record in records if recipe_of(record).schedule == "constant"]
    rows: list[list[str]] = []
    off: dict[str, Estimate] = {}
    for rate in dict.fromkeys(recipe_of(record).learning_rate for record in constant):
        own = by_plan([record for record in constant if recipe_of(record).learning_rate == rate])
        for plan in PLANS[1:]:
            if plan in own:
                said, came = _forecast(own[REFERENCE], plan), _seeds(own[plan], "edq_ratio")
                miss = difference(came, said)
                cells = [_mean(said, plan), _mean(came, plan), estimate(miss, "+.4f")]
                rows.append([f"{rate:g}", plan.strategy, *cells])
                off |= {f"`{plan.strategy}` at {rate:g}": miss} if miss else {}
    head = ["learning rate", "strategy", "predicted from fp32", "measured", "measured less predicted"]
    table = MarkdownTable(head, rows, "The table shows EDQ, merged over all measured steps.")
    evidence: list[str | MarkdownTable | Plot] = [table]
    verdict = _misses(off)
    cosine = by_plan([record for record in records if recipe_of(record).schedule == "cosine"])
    if cosine:
        onsets, told = _onsets(cosine)
        evidence += [onsets, _plot(cosine)]
        verdict += f" {told}"
    return Page(
        verdict,
        evidence,
        [
            "Counterfactuals are measured every hundred steps, EDQ every ten. A predicted step is no more exact "
            "than that, and the two are merged over different steps.",
            "A strategy's own run soon differs from the fp32 run, while a prediction is about the steps of "
            "the fp32 run.",
            "Stochastic rounding keeps every update in expectation, so its prediction is 1 without a measurement.",
            "The study has three seeds and one model. Intervals are those of the differences seed by seed.",
        ],
    )


def _seeds(records: Sequence[Record], metric: str) -> list[SeedValue]:
    return [
        SeedValue(value, None, recipe_of(record).seed)
        for record in records
        if (value := record.merged.get(metric)) is not None
    ]


def _forecast(reference: Sequence[Record], plan: Plan) -> list[SeedValue]:
    """The EDQ that the fp32 runs predict for a strategy, by seed; 1 for stochastic rounding, as in expectation."""
    if plan in PREDICTED:
        return _seeds(reference, PREDICTED[plan])
    return [SeedValue(1.0, None, recipe_of(record).seed) for record in reference]


def _mean(values: Sequence[SeedValue], plan: Plan) -> str:
    found = mean_over_seeds([entry.value for entry in values])
    exact = plan not in PREDICTED and found is not None and found.spread == 0
    return "1, in expectation" if exact else estimate(found)


def _misses(off: Mapping[str, Estimate]) -> str:
    """The largest difference from a prediction, and the differences beyond chance."""
    if not off:
        return "Nothing was compared."
    name, worst = max(off.items(), key=lambda entry: abs(entry[1].value))
    text = f"The predicted EDQ differs from the measured one by at most {abs(worst.value):.3f} ({name})."
    beyond = [
        f"{where} (by {estimate(gap, '+.3f')})"
        for where, gap in off.items()
        if gap.low is not None and gap.high is not None and not gap.low <= 0 <= gap.high
    ]
    if not beyond:
        return f"{text} No difference is beyond chance."
    return f"{text} In {len(beyond)} of {len(off)} cases the difference is beyond chance: {listed(beyond)}."


def _onsets(own: Mapping[Plan, Sequence[Record]]) -> tuple[MarkdownTable, str]:
    """By seed, the predicted and the measured step from which EDQ stays below `LOST`; and a sentence on both."""
    rows, misses, alone = [], [], 0
    came_by_seed = {recipe_of(record).seed: record for record in own[PLANS[1]]}
    for forecast in own[REFERENCE]:
        seed = recipe_of(forecast).seed
        steps = [_onset(forecast.curves[FORECAST]), _onset(came_by_seed[seed].curves["edq_ratio"])]
        rows.append([str(seed), *("never" if step is None else f"{step:,.0f}" for step in steps)])
        known = [step for step in steps if step is not None]
        misses += [known[1] - known[0]] if len(known) == len(steps) else []
        alone += len(known) == 1
    last = recipe_of(own[REFERENCE][0]).steps
    caption = (
        f"The table shows the first measured step from which EDQ stays below {LOST}, along a cosine to zero in "
        f"{last:,} steps."
    )
    parts = []
    if misses:
        parts.append(
            f"Along a cosine of {last:,} steps, plain bfloat16 begins to lose {_off(min(misses), max(misses))} "
            f"than predicted ({len(misses)} of {len(rows)} seeds)."
        )
    if alone:
        parts.append(
            f"With {alone} of {len(rows)} seeds, either the prediction or the run begins to lose, not both."
        )
    if not parts:
        parts.append("Along the cosine, neither the prediction nor the run begins to lose.")
    return MarkdownTable(["seed", "predicted from fp32", "plain bfloat16"], rows, caption), " ".join(parts)


def _off(least: float, most: float) -> str:
    """'340 to 580 steps earlier': by how many steps a run differs from its prediction."""
    if least < 0 < most:
        return f"between {-least:,.0f} steps earlier and {most:,.0f} later"
    low, high = sorted((abs(least), abs(most)))
    word = "earlier" if least < 0 else "later"
    return f"{low:,.0f} to {high:,.0f} steps {word}" if low < high else f"{low:,.0f} steps {word}"


def _onset(curve: Curve) -> float | None:
    return stays_below_from(curve.steps, curve.values, LOST)


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
    short="One fp32 run predicts the EDQ of plain bfloat16, of `light` and of stochastic rounding to within 0.011. "
    "Plain bfloat16 begins to lose updates somewhat earlier than predicted.",
    question="Does one fp32 run predict how much of the updates plain bfloat16, light and stochastic rounding "
    "keep? Does it predict the step at which plain bfloat16 begins to lose them?",
    method="`counterfactual_edq_ratio` is the EDQ that another strategy would have had on the steps of an fp32 "
    "run. The same model is then trained under these strategies, from the same weights and batches.",
    trials=trials,
    run=run_training,
    page=page,
)
