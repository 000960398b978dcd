"""Every strategy against fp32 on a GPT and a BERT, with paired seeds, at a small and at a usual learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from collage_studies.recipe import Plan, Recipe
from collage_studies.results import by_plan, gaps, mean, mean_of, recipe_of
from collage_studies.study import Page, Plot, Points, Record, Study, Table, Trial
from collage_studies.trained import run_training
from collage_studies.words import estimate, listed

__all__ = ["STUDY"]

STRATEGIES: Final = (
    "plain",
    "stochastic",
    "kahan",
    "light",
    "light-stochastic",
    "plus",
    "full",
    "fp32-states",
    "split-master",
    "split-master-16bit",
    "split-master-8bit",
    "split-24bit-8bit",
    "master-weights",
)
REFERENCE: Final = Plan("plain", "float32")
SEEDS: Final = (1, 2, 3)
RATES: Final = (1e-4, 1e-3)
MODELS: Final = ("gpt", "bert")
CURVES: Final = ("validation_loss", "edq_ratio")
SHAPE: Final = {"steps": 400, "batch_size": 16, "length": 64, "layers": 2, "width": 64, "warm_up_steps": 40}
QUICK: Final = {"steps": 40, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}


def trials(quick: bool) -> Sequence[Trial]:
    """Models × rates × seeds × (fp32, and every strategy in bfloat16); quick: three ways, of all else the first."""
    plans = [REFERENCE, *(Plan(name, "bfloat16") for name in STRATEGIES)]
    if quick:
        plans = [REFERENCE, Plan("plain", "bfloat16"), Plan("plus", "bfloat16")]
    shape = QUICK if quick else SHAPE
    return [
        Trial(
            name=f"{model}, {plan.name}, rate {rate:g}, seed {seed}",
            plan=plan,
            recipe=Recipe(model=model, learning_rate=rate, seed=seed, **shape),  # type: ignore[arg-type]
            curves=CURVES,
        )
        for model in MODELS[: 1 if quick else None]
        for rate in RATES[: 1 if quick else None]
        for seed in SEEDS[: 1 if quick else None]
        for plan in plans
    ]


def page(records: Sequence[Record]) -> Page:
    """For each model and rate: a table, costs first, and a plot of the gap against bytes."""
    evidence: list[str | Table | Plot] = []
    findings = []
    for model in dict.fromkeys(recipe_of(record).model for record in records):
        for rate in dict.fromkeys(recipe_of(record).learning_rate for record in records):
            own = [r for r in records if (recipe_of(r).model, recipe_of(r).learning_rate) == (model, rate)]
            evidence += [
                f"### {model.upper()}, learning rate {rate:g}",
                _table(own),
                _plot(own, f"{model}, {rate:g}"),
            ]
            findings.append(_finding(own, f"{model.upper()} at {rate:g}"))
    return Page(
        " ".join(findings),
        evidence,
        [
            "Models of some 100,000 parameters, 400 steps of 1,024 bytes: gaps of large trainings may differ.",
            "Three seeds: an interval that includes 0 does not show that there is no gap.",
            "Tokens a CPU second are of a busy machine and of eager steps; read them as an order of magnitude.",
        ],
    )


def _table(records: Sequence[Record]) -> Table:
    found = gaps(records, REFERENCE)
    rows = [
        [
            plan.name,
            mean(own, "bytes_per_parameter"),
            mean(own, "tokens_per_cpu_second"),
            estimate(mean_of(own, "validation_loss")),
            "reference" if plan == REFERENCE else estimate(found[plan], "+.4f"),
            mean(own, "edq_ratio", ".3f", merged=True),
            mean(own, "lost_update_ratio", ".1%", merged=True),
        ]
        for plan, own in sorted(by_plan(records).items(), key=lambda entry: _bytes(entry[1]))
    ]
    head = ["strategy", "bytes", "tokens/CPU s", "validation loss", "gap to fp32", "EDQ", "updates lost"]
    return Table(head, rows)


def _bytes(records: Sequence[Record]) -> float:
    found = mean_of(records, "bytes_per_parameter")
    return found.value if found else 0.0


def _plot(records: Sequence[Record], where: str) -> Plot:
    found = gaps(records, REFERENCE)
    curves = {}
    for plan, own in by_plan(records).items():
        size, gap = mean_of(own, "bytes_per_parameter"), found.get(plan)
        if size and gap:
            interval = ([gap.low], [gap.high]) if gap.low is not None and gap.high is not None else ()
            curves[plan.strategy] = Points([size.value], [gap.value], *interval)
    return Plot(
        file=f"strategies-{where.replace(', ', '-')}.png",
        title=f"Validation loss against fp32 ({where})",
        x="bytes a parameter",
        y="gap to fp32, nats a byte",
        curves=curves,
        lines=False,
    )


def _finding(records: Sequence[Record], where: str) -> str:
    found = gaps(records, REFERENCE)
    worse = {plan: gap for plan, gap in found.items() if gap and gap.low is not None and gap.low > 0}
    if not worse:
        return f"{where}: no strategy is shown to end worse than fp32."
    ordered = sorted(worse.items(), key=lambda entry: -entry[1].value)
    names = [f"{plan.strategy} ({estimate(gap, '+.3f')})" for plan, gap in ordered]
    return f"{where}: worse than fp32 beyond chance are {listed(names)}."


STUDY: Final = Study(
    name="strategies",
    title="Strategies on a GPT and a BERT",
    question="Which precision strategy ends at the loss of fp32, at a learning rate where plain bfloat16 visibly "
    "fails and at one where it hardly matters?",
    method="A byte-level GPT and a masked language model are trained on the interpreter's own sources, with each "
    "strategy and in fp32, from the same weights and batches for each of three seeds. The gap is the difference of "
    "the last validation losses, seed by seed, with Student's 95 % interval. EDQ and lost updates are merged over "
    "all measured steps.",
    trials=trials,
    run=run_training,
    page=page,
)
