"""Every strategy against fp32 on a GPT and a BERT, with paired seeds, at a small and at a usual learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from collage_demo.recipe import Plan, Recipe

from collage_monitor.seeds import Estimate
from collage_studies.number_words import estimate, quoted
from collage_studies.results import by_plan, gaps, gaps_in_words, mean, mean_of, recipe_of
from collage_studies.study import MarkdownTable, Page, Plot, PlotCurve, Record, Study, Trial
from collage_studies.training_trial import run_training

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
    """For each model and rate, a table that begins with costs, and a plot of the gap against bytes."""
    evidence: list[str | MarkdownTable | Plot] = []
    settings: dict[str, list[Record]] = {}
    for record in records:
        settings.setdefault(_setting(record), []).append(record)
    for where, own in settings.items():
        evidence += [f"### {where}", _table(own), _plot(own, where)]
    found = {
        where: {plan.strategy: gap for plan, gap in gaps(own, REFERENCE).items()} for where, own in settings.items()
    }
    verdicts = [f"**{where}.** {gaps_in_words(gap)}" for where, gap in found.items()]
    count = sum(len(gap) for gap in found.values())
    return Page(
        " ".join([_throughout(found), *verdicts]),
        evidence,
        [
            "The models have some 100,000 parameters and train for 400 steps of 1,024 bytes. Large trainings may "
            "show other gaps.",
            "With three seeds, an interval that includes 0 does not prove that there is no gap. Among the "
            f"{count} intervals some exclude 0 by chance alone, perhaps that of a strategy which is worse in a "
            "single setting.",
            "Every run but fp32 computes in bfloat16, which alone can cause a gap as small as that of "
            "`master-weights`.",
            "Tokens per CPU second come from eager steps on a busy machine, so read them as an order of magnitude.",
        ],
    )


def _setting(record: Record) -> str:
    recipe = recipe_of(record)
    return f"{recipe.model.upper()}, learning rate {recipe.learning_rate:g}"


def _throughout(found: Mapping[str, Mapping[str, Estimate | None]]) -> str:
    """In how many settings each strategy ends worse than fp32 beyond chance."""
    worse: dict[str, list[tuple[str, float]]] = {}
    for where, gap in found.items():
        for name, entry in gap.items():
            own = worse.setdefault(name, [])
            own += [(where, entry.value)] if entry and entry.low is not None and entry.low > 0 else []
    never = [name for name, own in worse.items() if not own]
    settings = "one setting" if len(found) == 1 else f"any of the {len(found)} settings"
    parts = (
        [f"These strategies are not shown to end worse than fp32 in {settings}: {quoted(never)}."] if never else []
    )
    for name, own in sorted(
        worse.items(), key=lambda entry: (-len(entry[1]), -max((v for _, v in entry[1]), default=0))
    ):
        if own:
            ends = [f"{value:+.4f}" for _, value in own]
            span = ends[0] if len(own) == 1 else f"{min(v for _, v in own):+.4f} to {max(v for _, v in own):+.4f}"
            where = own[0][0] if len(own) == 1 else f"{len(own)} of {len(found)} settings"
            parts.append(f"`{name}` ends worse than fp32 beyond chance in {where} ({span}).")
    return " ".join(parts)


def _table(records: Sequence[Record]) -> MarkdownTable:
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
    return MarkdownTable(head, rows)


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
            curves[plan.strategy] = PlotCurve([size.value], [gap.value], *interval)
    return Plot(
        file=f"strategies-{where.lower().replace(', learning rate ', '-')}.png",
        title=f"Validation loss against fp32 ({where})",
        x="bytes a parameter",
        y="gap to fp32, nats a byte",
        curves=curves,
        lines=False,
    )


STUDY: Final = Study(
    name="strategies",
    title="Strategies on a GPT and a BERT",
    short="Plain bfloat16 ends at a higher loss than fp32 in three of four settings, and so does bfloat16 with "
    "only its states in fp32. Strategies that keep the lost bits of the weights, or round them at random, are "
    "not shown to end worse.",
    question="Which precision strategy ends at the loss of fp32, at a learning rate where plain bfloat16 visibly "
    "fails and at one where it hardly matters?",
    method="A byte-level GPT and a masked language model (BERT) are trained on Python's standard library, with "
    "each strategy and in fp32. Three seeds give each strategy the same weights and batches as fp32. The gap is "
    "the last validation loss less that of fp32 with the same seed, with Student's 95 % interval. EDQ and lost "
    "updates are merged over all measured steps.",
    trials=trials,
    run=run_training,
    page=page,
)
