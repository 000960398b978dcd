"""Does EDQ predict quality? Correlation of early numbers of a run with its final gap to fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from collage_demo.recipe import Plan, Recipe

from collage_monitor.diagnosis import EDQ_TOLERANCE, LOST_TOLERANCE, STATE_TOLERANCE
from collage_monitor.diagnosis.states import ORACLE_TOLERANCE
from collage_monitor.seeds import Estimate, mean_over_seeds
from collage_studies.number_words import UNDEFINED, estimate, listed, share
from collage_studies.results import Point, by_plan, correlation, gaps, recipe_of
from collage_studies.study import MarkdownTable, Page, Plot, PlotCurve, Record, Study, Trial
from collage_studies.training_trial import run_training

__all__ = ["Configuration", "LOST", "STEP", "STUDY", "WINDOW", "configurations"]

REFERENCE: Final = Plan("plain", "float32")
PLANS: Final = (REFERENCE, *(Plan(name, "bfloat16") for name in ("plain", "light", "kahan", "stochastic")))
RATES: Final = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SEEDS: Final = (1, 2, 3)
WINDOW: Final = 8
EARLY: Final = 0.25
"""This share of a training's steps counts as early."""
STEP, ORACLE, MOVED = "edq_ratio", "edq_oracle_ratio", "oracle_displacement_ratio"
WINDOWED: Final = f"edq_window_ratio/{WINDOW}"
DECREMENT: Final = "state_decrement_ratio/exp_avg_sq"
LOST: Final = "lost_update_ratio"
CURVES: Final = ("validation_loss", STEP, WINDOWED, ORACLE, MOVED, DECREMENT, LOST)
SHAPE: Final = {"steps": 320, "batch_size": 8, "length": 64, "layers": 2, "width": 32, "warm_up_steps": 32}
QUICK: Final = {"steps": 80, "batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}
_OF_VISIBLE_WEIGHTS: Final = ("plain", "fp32-states")
"""Strategies that keep nothing beside the visible weight and round to nearest: judged by one step's EDQ."""

Number = Callable[[Record], float | None]


def trials(quick: bool) -> Sequence[Trial]:
    """Seeds × rates × plans; quick: one seed and rate, fp32 and three strategies."""
    shape = QUICK if quick else SHAPE
    return [
        Trial(
            name=f"{plan.name}, rate {rate:g}, seed {seed}",
            plan=plan,
            recipe=Recipe(learning_rate=rate, seed=seed, windows=(WINDOW,), **shape),  # type: ignore[arg-type]
            curves=CURVES,
        )
        for seed in SEEDS[: 1 if quick else None]
        for rate in (RATES[1:2] if quick else RATES)
        for plan in (PLANS[:4] if quick else PLANS)
    ]


@dataclass(frozen=True)
class Configuration:
    """The runs of one strategy in one setting (a training but for strategy and seed), with their gap to fp32."""

    setting: str
    plan: Plan
    runs: Sequence[Record]
    gap: Estimate

    @property
    def name(self) -> str:
        """The strategy and the setting."""
        return f"{self.plan.strategy} ({self.setting})"

    @property
    def ends_worse(self) -> bool:
        """Whether its last loss is above fp32's beyond chance: the whole interval of the gap is above 0."""
        return self.gap.low is not None and self.gap.low > 0

    def mean(self, number: Number) -> float | None:
        """A number's mean over the runs; None if it is undefined in one of them."""
        found = [number(run) for run in self.runs]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known and len(known) == len(found) else None


def _early(name: str) -> Number:
    """How far a metric's mean over the early steps is from 1, or from 0 for a lost share."""

    def number(record: Record) -> float | None:
        curve = record.curves.get(name)
        if curve is None:
            return None
        last = EARLY * recipe_of(record).steps
        pairs = zip(curve.steps, curve.values, strict=True)
        known = [value for step, value in pairs if value is not None and step <= last]
        return _missing(name, sum(known) / len(known)) if known else None

    return number


def _merged(name: str) -> Number:
    """As `_early`, for the metric merged over the whole run."""

    def number(record: Record) -> float | None:
        value = record.merged.get(name)
        return None if value is None else _missing(name, value)

    return number


def _missing(name: str, value: float) -> float:
    return value if name == LOST else abs(1 - value)


def _judged(record: Record) -> float | None:
    """The EDQ that the judgement uses: over a window where the strategy keeps more than the visible weight or
    rounds at random, otherwise of one step."""
    assert record.trial.plan is not None
    return _early(STEP if record.trial.plan.strategy in _OF_VISIBLE_WEIGHTS else WINDOWED)(record)


KINDS: Final[Mapping[str, tuple[Number, Number | None, float]]] = {
    "EDQ of one step": (_early(STEP), _merged(STEP), EDQ_TOLERANCE),
    f"EDQ over {WINDOW} steps": (_early(WINDOWED), None, EDQ_TOLERANCE),
    "EDQ of the judgement": (_judged, None, EDQ_TOLERANCE),
    "EDQ against the oracle": (_early(ORACLE), _merged(ORACLE), ORACLE_TOLERANCE),
    "oracle's displacement": (_early(MOVED), _merged(MOVED), ORACLE_TOLERANCE),
    "state decrement": (_early(DECREMENT), _merged(DECREMENT), STATE_TOLERANCE),
    "share of updates lost": (_early(LOST), _merged(LOST), LOST_TOLERANCE),
}
"""By name: the number early, the number over the whole run, and the judgement's bound on its deviation."""


def configurations(records: Sequence[Record]) -> list[Configuration]:
    """Every strategy in every setting that has an fp32 run with the same seed, without fp32 itself."""
    settings: dict[str, list[Record]] = {}
    for record in records:
        if record.trial.plan is not None and record.trial.recipe is not None:
            settings.setdefault(_setting(record), []).append(record)
    names = _short(list(settings), settings)
    return [
        Configuration(names[key], plan, by_plan(own)[plan], gap)
        for key, own in settings.items()
        for plan, gap in gaps(own, REFERENCE).items()
        if gap is not None
    ]


def _setting(record: Record) -> str:
    settings = {name: value for name, value in record.trial.settings.items() if name != "seed"}
    key = [replace(recipe_of(record), seed=0), settings]
    return msgspec.json.encode(key, order="sorted").decode()


def _short(keys: Sequence[str], settings: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """Short names of settings. Equal names get the shape and the study's own settings; names that are still equal,
    a number."""
    short: dict[str, str] = {}
    names: dict[str, str] = {}
    for key in keys:
        recipe = recipe_of(settings[key][0])
        short[key] = f"{recipe.model.upper()}, rate {recipe.learning_rate:g}, β₂ {recipe.betas[1]:g}"
    for key, name in short.items():
        own = settings[key][0]
        told = [name]
        if list(short.values()).count(name) > 1:
            told += [f"{recipe_of(own).steps} steps of width {recipe_of(own).width}"]
            told += [f"{word.replace('_', ' ')} {value}" for word, value in own.trial.settings.items()]
        name = ", ".join(told)
        count = sum(known == name or known.startswith(f"{name}, no. ") for known in names.values())
        names[key] = f"{name}, no. {count + 1}" if count else name
    return names


def page(records: Sequence[Record]) -> Page:
    """Correlations early, over the whole run and by rate, the numbers' failures, and the cost of a lost share."""
    every = configurations(records)
    own = [entry for entry in every if recipe_of(entry.runs[0]).windows]
    early = {name: number for name, (number, _, _) in KINDS.items()}
    whole = {name: number for name, (_, number, _) in KINDS.items() if number is not None}
    with_curve = [entry for entry in every if entry.mean(early["EDQ of one step"]) is not None]
    others = len(with_curve) - len(own)
    evidence: list[str | MarkdownTable | Plot] = [
        _correlations(
            own,
            early,
            f"The table shows correlations with the final gap early in the run (first {share(EARLY)} of the "
            f"steps), for the {len(own)} configurations of the sweep of learning rates.",
        ),
        *(
            [
                _correlations(
                    with_curve,
                    {"EDQ of one step": early["EDQ of one step"], "state decrement": early["state decrement"]},
                    f"The table adds {others} configurations of other studies, early in the run.",
                )
            ]
            if others
            else []
        ),
        _correlations(
            every,
            whole,
            f"The table shows correlations over the whole run, with {len(every) - len(own)} configurations of "
            "other studies added.",
        ),
        "The learning rate confounds pooled correlations, because a small rate loses more updates and is also "
        "further from the end of its training. Within one rate, strategies differ only in their storage.",
        _by_setting(own, early),
        _plot(own),
        _failures(own),
        _costs(every),
    ]
    return Page(
        f"{_verdict(own, early)} {_of_whole_runs(every, whole)}",
        evidence,
        [
            "A configuration is the mean over seeds of one strategy in one setting. fp32 does not count, because "
            "gaps are measured against it. A run whose loss is not finite has no gap and is left out.",
            f"At one rate the sweep has only {len(PLANS) - 1} configurations, so orders are coarse. Strategies "
            "that all end at fp32's loss have no order to predict.",
            "Intervals are over configurations, and configurations of one setting share seeds and fp32 runs.",
            "`plain` also keeps its moments in bfloat16, so its gap need not come from the weights alone.",
            "The models are small and the runs are short. Lost updates may cost more in long runs.",
        ],
    )


def _points(entries: Sequence[Configuration], number: Number) -> list[Point]:
    known = [(entry, entry.mean(number)) for entry in entries]
    return [Point(x, entry.gap.value, entry.setting) for entry, x in known if x is not None]


def _correlations(entries: Sequence[Configuration], kinds: Mapping[str, Number], caption: str) -> MarkdownTable:
    rows = []
    for name, number in kinds.items():
        points = _points(entries, number)
        cells = [
            estimate(correlation(points, ranks=ranks, within=within), "+.2f")
            for within in (True, False)
            for ranks in (True, False)
        ]
        rows.append([name, str(len(points)), *cells])
    head = ["distance from 1 of", "configurations", "rank, within a rate", "linear, within a rate"]
    return MarkdownTable([*head, "rank, pooled", "linear, pooled"], rows, caption)


def _by_setting(entries: Sequence[Configuration], kinds: Mapping[str, Number]) -> MarkdownTable:
    rows = []
    for setting in dict.fromkeys(entry.setting for entry in entries):
        own = [entry for entry in entries if entry.setting == setting]
        found = [correlation(_points(own, number), ranks=True, within=False) for number in kinds.values()]
        gap = max(own, key=lambda entry: entry.gap.value)
        cells = [UNDEFINED if value is None else f"{value.value:+.2f}" for value in found]
        rows.append([setting, *cells, f"{gap.plan.strategy}: {estimate(gap.gap, '+.4f')}"])
    return MarkdownTable(
        ["setting", *kinds, "largest gap"], rows, "The table shows the rank correlation at each rate of the sweep."
    )


def _plot(entries: Sequence[Configuration]) -> Plot:
    curves = {}
    for setting in dict.fromkeys(entry.setting for entry in entries):
        points = [point for point in _points(entries, _early(STEP)) if point.stratum == setting]
        rate = next(recipe_of(entry.runs[0]).learning_rate for entry in entries if entry.setting == setting)
        curves[f"rate {rate:g}"] = PlotCurve([point.x for point in points], [point.y for point in points])
    return Plot(
        file="quality.png",
        title="Descent lost early, and the final gap to fp32 (a dot: a strategy)",
        x="1 − EDQ of one step, first quarter",
        y="gap to fp32, nats a byte",
        curves=curves,
        lines=False,
    )


def _flags(entries: Sequence[Configuration], kind: str) -> tuple[list[str], list[str], int, int]:
    """Names of the missed and of the falsely flagged configurations; then how many end worse, and how many do
    not."""
    number, _, bound = KINDS[kind]
    known = [(entry, x) for entry in entries if (x := entry.mean(number)) is not None]
    worse = [(entry, x) for entry, x in known if entry.ends_worse]
    fine = [(entry, x) for entry, x in known if not entry.ends_worse]
    missed = [entry.name for entry, x in worse if x <= bound]
    harmless = [entry.name for entry, x in fine if x > bound]
    return missed, harmless, len(worse), len(fine)


def _failures(entries: Sequence[Configuration]) -> MarkdownTable:
    rows = []
    for kind, (_, _, bound) in KINDS.items():
        missed, harmless, worse, fine = _flags(entries, kind)
        rows.append(
            [
                kind,
                f"{bound:g}",
                f"{len(missed)} of {worse}: {'; '.join(missed)}" if missed else f"0 of {worse}",
                f"{len(harmless)} of {fine}: {'; '.join(harmless)}" if harmless else f"0 of {fine}",
            ]
        )
    head = ["number", "bound of the judgement", "ends worse than fp32 beyond chance, not beyond the bound"]
    caption = "The table shows where each early number fails against the judgement's bound."
    return MarkdownTable([*head, "beyond the bound, not shown to end worse"], rows, caption)


def _costs(entries: Sequence[Configuration]) -> MarkdownTable:
    plain = [entry for entry in entries if entry.plan == Plan("plain", "bfloat16")]
    known = []
    for entry in plain:
        lost, missing = entry.mean(_merged(LOST)), entry.mean(_merged(STEP))
        if lost is not None and missing is not None:
            loss = mean_over_seeds([run.values["validation_loss"] or 0.0 for run in entry.runs])
            known.append((lost, missing, entry, loss.value - entry.gap.value if loss else None))
    rows = [
        [
            entry.setting,
            share(lost),
            share(missing),
            estimate(entry.gap, "+.4f"),
            share(entry.gap.value / base) if base else UNDEFINED,
        ]
        for lost, missing, entry, base in sorted(known, key=lambda found: found[0])
    ]
    head = ["setting", "updates lost", "descent lost (1 − EDQ)", "gap to fp32, nats a byte", "of fp32's loss"]
    return MarkdownTable(
        head,
        rows,
        "The table shows what plain bfloat16 loses over its run and what that costs, ordered by the share of "
        "updates lost.",
    )


def _verdict(entries: Sequence[Configuration], kinds: Mapping[str, Number]) -> str:
    found = {name: correlation(_points(entries, number), ranks=True, within=True) for name, number in kinds.items()}
    shown = {name: value for name, value in found.items() if value and value.low is not None and value.low > 0}
    ordered = sorted(shown, key=lambda name: -shown[name].value)
    parts = []
    if ordered:
        numbers = [f"{name} ({estimate(shown[name], '+.2f')})" for name in ordered]
        parts.append(f"Within a rate, these early numbers predict the order of the final gaps: {listed(numbers)}.")
    else:
        parts.append("Within a rate, no early number is shown to predict the order of the final gaps.")
    silent = [name for name in kinds if name not in shown]
    if ordered and silent:
        parts.append(f"The order is not shown to follow {listed(silent)}.")
    sizes = {
        name: correlation(_points(entries, number), ranks=False, within=True) for name, number in kinds.items()
    }
    linear = [name for name, value in sizes.items() if value and value.low is not None and value.low > 0]
    if linear:
        named = [f"{name} ({estimate(sizes[name], '+.2f')})" for name in linear]
        parts.append(f"The size of the gaps correlates with these early numbers: {listed(named)}.")
    missed, harmless, worse, fine = _flags(entries, "EDQ of the judgement")
    parts.append(
        f"Early in the run, the judgement's EDQ misses {len(missed)} of the {worse} configurations that end worse "
        f"than fp32 beyond chance, and flags {len(harmless)} of the {fine} others."
    )
    if worse:
        wrong = {kind: sum(map(len, _flags(entries, kind)[:2])) for kind in kinds}
        best = [kind for kind in kinds if wrong[kind] == min(wrong.values())]
        parts.append(
            f"Judged by the {listed(best)}, the fewest are wrong ({min(wrong.values())} of {worse + fine})."
        )
    return " ".join(parts)


def _of_whole_runs(entries: Sequence[Configuration], kinds: Mapping[str, Number]) -> str:
    """Which numbers of whole runs order the gaps within a rate; such numbers describe and predict nothing."""
    found = {name: correlation(_points(entries, number), ranks=True, within=True) for name, number in kinds.items()}
    shown = [name for name, value in found.items() if value and value.low is not None and value.low > 0]
    ends = f"Over whole runs ({len(entries)} configurations), "
    if not shown:
        return f"{ends}the order of the gaps within a rate is not shown to correlate with any number."
    named = [f"{name} ({estimate(found[name], '+.2f')})" for name in shown]
    return f"{ends}the order of the gaps within a rate correlates with these numbers: {listed(named)}."


STUDY: Final = Study(
    name="quality",
    title="Does EDQ predict quality?",
    short="EDQ and the share of lost updates in the first quarter of a run correlate with how much worse than "
    "fp32 it ends. They are no exact forecast: within a learning rate the order is only roughly right.",
    question="Do the updates lost early in a run predict its final gap to fp32, by rank and by size, at one rate "
    "and across rates? Which number predicts it, where does it fail, and what does a lost share cost?",
    method=f"The small GPT is trained at {len(RATES)} rates in fp32 and under four strategies, three seeds each. "
    "For each strategy at each rate, the study takes an early number's distance from its value in exact "
    "arithmetic. It correlates that distance with the gap, the last validation loss less that of fp32 with the "
    "same seed and batches. Rank correlations are Spearman's, linear ones Pearson's. Those within a rate use the "
    "ranks, or the differences from the mean, within each setting. The 95 % intervals are bootstrapped over "
    "configurations. Runs of other studies are added wherever they have the number.",
    trials=trials,
    run=run_training,
    page=page,
    reads=("strategies", "beta2", "finetuning"),
    repeat_metrics=("validation_loss", STEP),
)
