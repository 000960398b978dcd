"""Fine-tuning all weights, or adapters, from a checkpoint at small learning rates: which strategies keep
updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from collage_demo.corpus import DOCUMENTATION, documentation, standard_library
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import validate

from collage_monitor.seeds import Estimate
from collage_studies.low_rank_adapters import AdapterIn, AdapterOut
from collage_studies.number_words import UNDEFINED, estimate, listed, quoted, share
from collage_studies.pretrained import build_from_weights, checkpoint
from collage_studies.results import by_plan, gaps, gaps_in_words, mean, mean_curve, mean_of, recipe_of
from collage_studies.study import MarkdownTable, Page, Plot, PlotCurve, Record, ReportTarget, Study, Trial
from collage_studies.training_trial import run_training

__all__ = ["STUDY"]

REFERENCE: Final = Plan("plain", "float32")
STRATEGIES: Final = ("plain", "kahan", "stochastic", "light", "plus", "split-master", "master-weights")
PAIRS: Final = ("light", "plus")
RATES: Final = (1e-5, 3e-5, 1e-4)
SEEDS: Final = (1, 2, 3)
RANK: Final = 8
SCALE: Final = 2.0
EDQ_BOUND: Final = 0.95
LOST_BOUND: Final = 0.05
"""The verdict's bounds for losing updates: EDQ below the first, or lost updates and update error above the
second."""
PRETRAINING: Final[Mapping[str, Any]] = {
    "batch_size": 16,
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warm_up_steps": 50,
    "weight_decay": 0.1,
}
METRICS: Final = ("edq_ratio", "lost_update_ratio", "update_error_ratio")


@dataclass(frozen=True)
class Way:
    """Which weights learn, and from which checkpoint. `types`: layers whose updates are shown, the first in
    detail."""

    title: str
    rank: int
    exact: bool
    types: tuple[str, str]
    strategies: tuple[str, ...]
    rates: tuple[float, ...]


WAYS: Final = {
    "all": Way("All weights", 0, False, ("LayerNorm", "Linear"), STRATEGIES, RATES),
    "exact": Way(
        "All weights, from the checkpoint as it was in fp32",
        0,
        True,
        ("LayerNorm", "Linear"),
        ("plus", "split-master"),
        RATES[:1],
    ),
    "lora": Way(
        f"LoRA of rank {RANK}",
        RANK,
        False,
        (AdapterIn.__name__, AdapterOut.__name__),
        ("plain", "plus"),
        (RATES[0], RATES[-1]),
    ),
}
SHAPE: Final = {"batch_size": 8, "length": 64, "layers": 2, "width": 64}
QUICK: Final = {"batch_size": 8, "length": 32, "layers": 1, "width": 32}


def trials(quick: bool) -> Sequence[Trial]:
    """Ways × rates × (fp32, strategies) × seeds; quick: one rate and seed, fp32 and plus, all weights and LoRA."""
    shape = {**(QUICK if quick else SHAPE), "steps": 40 if quick else 250, "warm_up_steps": 10 if quick else 20}
    found = []
    for name, way in WAYS.items():
        if quick and way.exact:
            continue
        plans = [REFERENCE, *(Plan(entry, "bfloat16") for entry in (PAIRS[1:] if quick else way.strategies))]
        curves = [f"{metric}@{way.types[0]}" for metric in METRICS]
        settings = {"rank": way.rank, "checkpoint_steps": 40 if quick else 1500}
        found += [
            Trial(
                name=f"{plan.name}, {_LEARN[name]}, rate {rate:g}, seed {seed}",
                plan=plan,
                recipe=Recipe(learning_rate=rate, seed=seed, weight_decay=0.01, **shape),  # type: ignore[arg-type]
                settings={**settings, "exact": True} if way.exact else settings,
                curves=(*curves, f"edq_ratio@{way.types[1]}"),
            )
            for rate in way.rates[: 1 if quick else None]
            for plan in plans
            for seed in SEEDS[: 1 if quick else None]
        ]
    return found


_LEARN: Final = {"all": "all weights", "exact": "all weights from fp32", "lora": "LoRA"}


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """Fine-tune the seed's checkpoint on the documentation; `start_loss` is the validation loss before that."""
    assert trial.plan is not None
    assert trial.recipe is not None
    settings, corpus = trial.settings, documentation()
    before = replace(trial.recipe, steps=settings["checkpoint_steps"], **PRETRAINING)
    code = standard_library(without=(DOCUMENTATION,))
    weights = checkpoint(before, code, reporting.folder / "checkpoints")
    build = build_from_weights(weights, exact=settings.get("exact", False), rank=settings["rank"], scale=SCALE)
    start = validate(build(trial.plan, trial.recipe)[0], trial.recipe, corpus)
    record = run_training(trial, reporting, corpus=corpus, build=build)
    return msgspec.structs.replace(record, values={**record.values, "start_loss": start})


def page(records: Sequence[Record]) -> Page:
    """For all weights and for adapters, a table at each rate, and plots of gap and EDQ over rates."""
    evidence: list[str | MarkdownTable | Plot] = []
    verdicts, count = [], 0
    for name, way in WAYS.items():
        by_rate = _by_rate([record for record in records if _is_of(record, way)])
        if not by_rate:
            continue
        for rate, found in by_rate.items():
            count += len(gaps(found, REFERENCE))
            evidence += [f"### {way.title}, learning rate {rate:g}", _table(found, way)]
        evidence += [] if way.exact else _plots(by_rate, name, way)
        verdicts += [_losses(by_rate, way), _pairs(by_rate, way)]
    return Page(
        " ".join(verdicts),
        evidence,
        [
            "The model has some 137,000 parameters and trains for 250 steps of 512 bytes at a constant rate. "
            "Longer fine-tuning, and a schedule that falls to zero, were not run.",
            "`light` and `plus` keep a weight as a pair: the low component holds what rounding cuts off the high "
            "one. After a checkpoint in bfloat16 it begins at 0, where bfloat16 is finest, so it holds the first "
            "updates of any weight. A pair reaches the resolution that the optimizers' table gives only once the "
            "low component has filled up. So the study also begins from the fp32 checkpoint, where it is full.",
            f"Adapters are stored in the weights' dtype here (rank {RANK}, scale {SCALE:g}). By default peft "
            "stores the adapters of 16-bit models in fp32, which avoids these losses.",
            f"With three seeds, an interval that includes 0 does not prove that there is no gap. Among the {count} "
            "intervals, some exclude 0 by chance alone.",
            "Every run but fp32 computes in bfloat16, which alone can cause a gap as small as that of "
            "`master-weights`.",
            "Lost updates and update errors of one step misjudge stochastic rounding, because its errors "
            "average out.",
        ],
    )


def _is_of(record: Record, way: Way) -> bool:
    settings = record.trial.settings
    return bool(settings["rank"] == way.rank and settings.get("exact", False) == way.exact)


def _by_rate(records: Sequence[Record]) -> dict[float, list[Record]]:
    found: dict[float, list[Record]] = {}
    for record in records:
        found.setdefault(recipe_of(record).learning_rate, []).append(record)
    return found


def _table(records: Sequence[Record], way: Way) -> MarkdownTable:
    found, plans = gaps(records, REFERENCE), by_plan(records)
    gained = _gain(plans[REFERENCE])
    first, second = way.types
    rows = [
        [
            "fp32" if plan == REFERENCE else plan.strategy,
            estimate(mean_of(own, "validation_loss")),
            "reference" if plan == REFERENCE else estimate(found[plan], "+.4f"),
            share(_gain(own) / gained) if gained else UNDEFINED,
            mean(own, "edq_ratio", ".3f", merged=True),
            mean(own, "lost_update_ratio", ".1%", merged=True),
            mean(own, "update_error_ratio", ".3f", merged=True),
            _of_type(own, f"edq_ratio@{first}", ".3f"),
            _of_type(own, f"lost_update_ratio@{first}", ".1%"),
            _of_type(own, f"update_error_ratio@{first}", ".3f"),
            _of_type(own, f"edq_ratio@{second}", ".3f"),
        ]
        for plan, own in plans.items()
    ]
    head = ["strategy", "validation loss", "gap to fp32", "of fp32's gain", "EDQ", "updates lost", "update error"]
    head += [f"{first}: EDQ", "lost", "error", f"{second}: EDQ"]
    start = mean(plans[REFERENCE], "start_loss", ".4f")
    return MarkdownTable(
        head, rows, f"Before fine-tuning the validation loss is {start}, and fp32 lowers it by {gained:.4f}."
    )


def _gain(records: Sequence[Record]) -> float:
    """How far the mean validation loss fell."""
    start, end = mean_of(records, "start_loss"), mean_of(records, "validation_loss")
    return start.value - end.value if start and end else 0.0


def _typical(records: Sequence[Record], curve: str) -> float | None:
    """The mean of a curve over runs and measured steps."""
    points = mean_curve(records, curve).y
    return sum(points) / len(points) if points else None


def _of_type(records: Sequence[Record], curve: str, form: str) -> str:
    found = _typical(records, curve)
    return UNDEFINED if found is None else format(found, form)


def _plots(by_rate: Mapping[float, Sequence[Record]], name: str, way: Way) -> list[Plot]:
    """The gap to fp32, and EDQ of the first type of layer, over learning rates."""
    lost: dict[str, list[tuple[float, Estimate]]] = {}
    kept: dict[str, list[tuple[float, float]]] = {}
    for rate, records in by_rate.items():
        for plan, gap in gaps(records, REFERENCE).items():
            lost.setdefault(plan.strategy, []).extend([(rate, gap)] if gap else [])
            arrived = _typical(by_plan(records)[plan], f"edq_ratio@{way.types[0]}")
            kept.setdefault(plan.strategy, []).extend([] if arrived is None else [(rate, arrived)])
    return [
        Plot(
            file=f"finetuning-{name}-gap.png",
            title=f"{way.title}: validation loss against fp32 (band: 95 % interval)",
            x="learning rate",
            y="gap to fp32, nats a byte",
            curves={
                strategy: PlotCurve(
                    [rate for rate, _ in found],
                    [gap.value for _, gap in found],
                    [gap.value if gap.low is None else gap.low for _, gap in found],
                    [gap.value if gap.high is None else gap.high for _, gap in found],
                )
                for strategy, found in lost.items()
            },
            x_scale="log",
        ),
        Plot(
            file=f"finetuning-{name}-edq.png",
            title=f"{way.title}: EDQ of {way.types[0]} layers",
            x="learning rate",
            y="EDQ",
            curves={n: PlotCurve([x for x, _ in found], [y for _, y in found]) for n, found in kept.items()},
            x_scale="log",
        ),
    ]


def _losses(by_rate: Mapping[float, Sequence[Record]], way: Way) -> str:
    said = []
    for rate, records in by_rate.items():
        found = {plan.strategy: gap for plan, gap in gaps(records, REFERENCE).items()}
        said.append(f"*Learning rate {rate:g}.* {gaps_in_words(found)}")
    return f"**{way.title}.** {' '.join(said)}"


def _pairs(by_rate: Mapping[float, Sequence[Record]], way: Way) -> str:
    """Whether light and plus lose updates of the first type of layer by the verdict's bounds, and the loss shows
    it."""
    kind, seen = way.types[0], []
    failing: list[str] = []
    for rate, records in by_rate.items():
        found = gaps(records, REFERENCE)
        for plan, own in by_plan(records).items():
            numbers = [_typical(own, f"{metric}@{kind}") for metric in METRICS]
            if plan.strategy not in PAIRS or None in numbers:
                continue
            arrived, lost, error = (value or 0.0 for value in numbers)
            if arrived >= EDQ_BOUND and min(lost, error) <= LOST_BOUND:
                continue
            where = f"`{plan.strategy}` at {rate:g}"
            failing += [f"{where} (EDQ {arrived:.2f}, {lost:.0%} lost, update error {error:.2f})"]
            gap = found[plan]
            seen += [where] if gap and gap.low is not None and gap.low > 0 else []
    if not failing:
        pairs = quoted(name for name in PAIRS if name in way.strategies)
        return f"By the verdict's bounds, no updates of {kind} layers are lost under {pairs}."
    shown = f"a worse loss is shown for {listed(seen)}" if seen else "a worse loss is shown for none of them"
    return f"By the verdict's bounds, {kind} layers lose updates under {listed(failing)}; {shown}."


STUDY: Final = Study(
    name="finetuning",
    title="Fine-tuning",
    short="Fine-tuning in plain bfloat16 ends at a higher loss at every learning rate tried, while `split-master` "
    "shows no difference from fp32. `light` and `plus` lose updates of LayerNorm weights at small rates, but the "
    "loss does not show it.",
    question="Which strategies keep the updates when all weights, or LoRA's adapters, are fine-tuned at learning "
    "rates of 1e-5 to 1e-4? `light` and `plus` should lose updates of weights near 1 (LayerNorm). Do they, and "
    "does the loss show it?",
    method="A byte-level GPT is trained on the standard library's code in fp32, once for each of three seeds, and "
    "rounded to bfloat16. Each strategy, and fp32, then fine-tunes it on the language reference (the text behind "
    "`help`), with the same batches. Validation uses topics of the reference that are held out. The gap is the "
    "last validation loss less that of fp32 with the same seed, with Student's 95 % interval. Numbers for one "
    "type of layer are means over measured steps; every other number is merged over them. LoRA is our own "
    "implementation in the usual form, on every linear layer of a block: A is random (AdapterIn), B is zero "
    "(AdapterOut), and all other weights are frozen.",
    trials=trials,
    run=run,
    page=page,
)
