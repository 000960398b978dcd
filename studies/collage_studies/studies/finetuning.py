"""Fine-tuning from a checkpoint at small learning rates, of all weights and of adapters: who keeps the updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from collage_demo.corpus import DOCUMENTATION, documentation, standard_library
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import validate

from collage_monitor.seeds import Estimate
from collage_studies.pretrained import build_from_weights, checkpoint
from collage_studies.results import by_plan, gaps, gaps_in_words, mean, mean_curve, mean_of, recipe_of
from collage_studies.study import MarkdownTable, Page, Plot, PlotCurve, Record, ReportTarget, Study, Trial
from collage_studies.training_trial import run_training
from collage_studies.words import UNDEFINED, estimate, listed, share

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
"""The verdict's bounds for losing updates: EDQ below the one; lost updates and update error above the other."""
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
    """What learns, and from what; `types` of layers whose updates are looked at, the first of them the closest."""

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
        ("AdapterIn", "AdapterOut"),
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
    """Fine-tune the seed's checkpoint on the documentation; `start_loss` is the validation loss before."""
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
    """For all weights and for adapters: a table by rate, and plots of gap and EDQ over rates."""
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
            "A model of some 137,000 parameters, 250 steps of 512 bytes at a constant rate. Longer fine-tuning, "
            "and a schedule that falls to zero, were not run.",
            "From a checkpoint that is rounded to bfloat16 the low component of a pair is 0, and fine near 0: it "
            "holds the first updates whatever the weight. Only when it is full, a pair is as coarse as the "
            "optimizers' table has it; so the same is begun from all bits of the checkpoint, too.",
            f"Adapters are kept in the weights' dtype here (rank {RANK}, scale {SCALE:g}); peft casts those of "
            "16-bit models to fp32 unless told otherwise, and then nothing of this touches them.",
            f"Three seeds: an interval that includes 0 does not show that there is no gap. Of {count} intervals, "
            "some exclude 0 by chance alone.",
            "All but fp32 compute in bfloat16: a gap as small as that of `master-weights` may come of that alone.",
            "Lost updates and update errors of one step misjudge stochastic rounding, whose errors even out.",
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
    return MarkdownTable(head, rows, f"Before, the validation loss is {start}; fp32 gains {gained:.4f}.")


def _gain(records: Sequence[Record]) -> float:
    """By how much the mean validation loss fell."""
    start, end = mean_of(records, "start_loss"), mean_of(records, "validation_loss")
    return start.value - end.value if start and end else 0.0


def _typical(records: Sequence[Record], curve: str) -> float | None:
    """A curve's mean over runs, and over measured steps."""
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
        said.append(f"At {rate:g}, {gaps_in_words(found)}.")
    return f"**{way.title}**, last loss against fp32. {' '.join(said)}"


def _pairs(by_rate: Mapping[float, Sequence[Record]], way: Way) -> str:
    """Whether pairs lose updates of the first type of layer by the verdict's bounds, and if the loss shows it."""
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
            where = f"{plan.strategy} at {rate:g}"
            failing += [f"{where} (EDQ {arrived:.2f}, {lost:.0%} lost, update error {error:.2f})"]
            gap = found[plan]
            seen += [where] if gap and gap.low is not None and gap.low > 0 else []
    if not failing:
        return f"By the verdict's bounds, no pair loses updates of {kind} layers."
    shown = f"a worse loss is shown for {listed(seen)}" if seen else "a worse loss is shown for none of them"
    return f"By the verdict's bounds, updates of {kind} layers are lost by {listed(failing)}; {shown}."


STUDY: Final = Study(
    name="finetuning",
    title="Fine-tuning",
    short="Fine-tuning in plain bfloat16 ends at a higher loss at every learning rate tried; `split-master` is "
    "not told apart from fp32. `light` and `plus` lose updates of LayerNorm weights at small rates, but "
    "the loss does not show it.",
    question="Which strategies keep the updates of fine-tuning, at learning rates of 1e-5 to 1e-4, of all weights "
    "and of LoRA's adapters? Pairs should fail on weights near 1 (LayerNorm): do they, and does the loss see it?",
    method="A byte-level GPT is trained on the standard library's code in fp32, once for each of three seeds, and "
    "rounded to bfloat16. From there, strategies and fp32 fine-tune it on the language reference (the text behind "
    "`help`), with the same batches. Validation is on held-out topics of the reference. The gap is the difference "
    "of the last validation losses, seed by seed, with Student's 95 % interval. What is said of a type of layer is "
    "the mean over measured steps; all else is merged over them. LoRA is our own, in the usual form: A drawn "
    "(AdapterIn), B zero (AdapterOut), on every linear layer of a block, all else frozen.",
    trials=trials,
    run=run,
    page=page,
)
