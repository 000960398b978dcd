"""The first page of the studies: the answer of each, and the paper's claims beside our measurements.

It reads records alone (`tests/studies/test_summary_page.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from collage_demo.recipe import Plan

from collage_studies.catalogue import STUDY_NAMES, study_named
from collage_studies.number_words import estimate, listed, number, share
from collage_studies.pages import table_text
from collage_studies.repeats import compare_repeat, record_file, repeats_of
from collage_studies.results import by_plan, gaps, mean_of, recipe_of
from collage_studies.study import MarkdownTable, Record

__all__ = [
    "CLAIMS",
    "records_of",
    "summary_text",
    "write_summary",
]

Records = Mapping[str, Sequence[Record]]
"""Records by study; empty for a study that has not been run whole."""
_MASTER: Final = Plan("master-weights", "bfloat16")
_OF_THE_PAPER: Final = tuple(Plan(name, "bfloat16") for name in ("light", "plus"))
_DECREMENT: Final = "state_decrement_ratio/exp_avg_sq"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the study that tested it, what its records show, and why that may differ."""

    said: str
    study: str
    measured: Callable[[Sequence[Record]], str]
    why: str


def records_of(name: str, folder: Path, *, quick: bool = False) -> list[Record]:
    """The records of a study under FOLDER/data; none where it has not been run whole, or does not exist."""
    if name not in STUDY_NAMES:
        return []
    trials, file = study_named(name).trials(quick), record_file(name, folder)
    return [] if file.missing(trials) else file.of(trials)


def write_summary(folder: Path, *, quick: bool = False) -> Path:
    """Write FOLDER/README.md from the records under FOLDER/data."""
    written = folder / "README.md"
    written.write_text(summary_text(folder, quick=quick), encoding="utf-8")
    return written


def summary_text(folder: Path, *, quick: bool = False) -> str:
    """The page in Markdown. It names the studies that have no records yet."""
    found = {name: records_of(name, folder, quick=quick) for name in STUDY_NAMES}
    answers = "\n".join(_answer(name, found) for name in STUDY_NAMES)
    rows = [[claim.said, _measured(claim, found), claim.why] for claim in CLAIMS]
    parts = [
        "# Studies",
        "We tried on real training what the method's paper (Collage, arXiv 2405.03637) claims and leaves open. "
        "The models are small and ran on two cores, so trust the directions rather than the sizes. "
        "`python -m collage_studies NAME` runs a study and writes its page from the records beside it.",
        "## Answers",
        answers,
        *_repeated(folder, found, quick=quick),
        "## The paper and we",
        table_text(MarkdownTable(["the paper says", "we measured", "why it may differ"], rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _repeated(folder: Path, found: Records, *, quick: bool) -> list[str]:
    """A table of the studies that were repeated with other seeds, and whether the repeats agree."""
    rows = []
    for name, records in found.items():
        study = study_named(name)
        repeats = repeats_of(study, study.trials(quick), folder) if records else []
        for held in (compare_repeat(study, records, repeat) for repeat in repeats):
            agrees = f"{held.within} of {held.count}"
            seeds = listed(map(str, held.seeds))
            rows.append([study.title, seeds, "yes" if held.same else "no", agrees, str(held.most_by_chance)])
    if not rows:
        return []
    text = (
        "Some studies were run again with other seeds. A repeat agrees if no more of its means differ from the "
        "first run's, beyond the 95 % interval of the difference, than chance explains."
    )
    head = ["study", "seeds", "agrees", "means within the interval", "outside it by chance, at most"]
    return ["## Repeated with other seeds", text, table_text(MarkdownTable(head, rows))]


def _answer(name: str, found: Records) -> str:
    title = study_named(name).title
    if not found[name]:
        return f"- **{title}**: not run yet (`python -m collage_studies {name}`)."
    return f"- **[{title}]({name}.md)**: {study_named(name).short}"


def _measured(claim: Claim, found: Records) -> str:
    records = found.get(claim.study, [])
    if not records:
        return f"not run yet: `python -m collage_studies {claim.study}`"
    return f"{claim.measured(records)} ([{claim.study}]({claim.study}.md))"


def _quality(records: Sequence[Record]) -> str:
    """Gaps of light and plus to fp32 master weights in each setting."""
    settings: dict[str, list[Record]] = {}
    for record in records:
        recipe = recipe_of(record)
        settings.setdefault(f"{recipe.model.upper()} at {recipe.learning_rate:g}", []).append(record)
    parts = []
    for plan in _OF_THE_PAPER:
        ends = [
            f"{estimate(gap, '+.4f')} ({where})"
            for where, own in settings.items()
            if (gap := gaps(own, _MASTER).get(plan))
        ]
        parts += [f"`{plan.strategy}` {listed(ends)}"] if ends else []
    return f"gap to master weights: {'; '.join(parts)}" if parts else "neither was run"


def _states(records: Sequence[Record]) -> str:
    """How much of the second moment's decay arrives under plain, light and plus at each β₂."""
    parts = []
    for plan in (Plan("plain", "bfloat16"), *_OF_THE_PAPER):
        own = by_plan(records).get(plan, [])
        values = sorted({recipe_of(record).betas[1] for record in own})
        known = [
            f"{found.value:.2f} at β₂ = {beta2:g}"
            for beta2 in values
            if (found := mean_of([r for r in own if recipe_of(r).betas[1] == beta2], _DECREMENT, merged=True))
        ]
        parts += [f"`{plan.strategy}` {listed(known)}"] if known else []
    return f"the second moment's decay that arrives: {'; '.join(parts)}" if parts else "none of them was run"


def _tells_apart(records: Sequence[Record]) -> str:
    """EDQ of plain, light and plus at the smallest rate."""
    rate = min(recipe_of(record).learning_rate for record in records)
    own = by_plan([record for record in records if recipe_of(record).learning_rate == rate])
    known = [
        f"{found.value:.3f} (`{plan.strategy}`)"
        for plan in (Plan("plain", "bfloat16"), *_OF_THE_PAPER)
        if (found := mean_of(own.get(plan, []), "edq_ratio", merged=True))
    ]
    oracle = [
        f"{found.value:.3f} (`{plan.strategy}`)"
        for plan in _OF_THE_PAPER
        if (found := mean_of(own.get(plan, []), "edq_oracle_ratio", merged=True))
    ]
    against = f"; against the fp64 oracle {listed(oracle)}" if oracle else ""
    return f"at a rate of {rate:g}, EDQ is {listed(known or ['undefined'])}{against}"


def _value(records: Sequence[Record], strategy: str, name: str) -> float | None:
    found = (record.values.get(name) for record in records if record.trial.settings["strategy"] == strategy)
    return next((value for value in found if value is not None), None)


def _bytes(records: Sequence[Record]) -> str:
    names = ("plain", "light", "plus", _MASTER.strategy)
    return listed(f"{number(_value(records, name, 'bytes_per_parameter'))} (`{name}`)" for name in names)


def _saving(records: Sequence[Record]) -> str:
    parts = []
    for plan in _OF_THE_PAPER:
        for batch in records[0].trial.settings["batches"]:
            own, reference = (_value(records, name, f"peak/{batch}") for name in (plan.strategy, _MASTER.strategy))
            saved = 1 - own / reference if own is not None and reference else None
            parts.append(f"{share(saved)} (`{plan.strategy}`, batch {batch})")
    return f"the peak of a training step falls by {listed(parts)}"


def _speed(records: Sequence[Record]) -> str:
    parts = []
    for plan in _OF_THE_PAPER:
        own, reference = (_value(records, name, "step_ratio/median") for name in (plan.strategy, _MASTER.strategy))
        parts.append(f"{number(reference / own if own and reference else None)} (`{plan.strategy}`)")
    return f"on a CPU, an eager update runs at {listed(parts)} times the speed of the one with master weights"


def _foretells(_: Sequence[Record]) -> str:
    return study_named("quality").short


CLAIMS: Final = (
    Claim(
        "Quality equal to or better than with fp32 master weights, in pre-training",
        "strategies",
        _quality,
        "Models of some 100,000 parameters and 400 steps; the paper trains larger ones for longer",
    ),
    Claim("8, 10, 12 and 16 bytes a parameter (options A, B, C, D)", "memory", _bytes, "counted alike"),
    Claim(
        "15–23 % less memory in practice",
        "memory",
        _saving,
        "The share of activations in the peak decides; ours is a CPU, one process, and an eager step with scratch",
    ),
    Claim(
        "Up to 3.7 times the training throughput (GPT 6.7B)",
        "memory",
        _speed,
        "Ours is an update alone, on a CPU. On the paper's accelerators memory traffic bounds a step, and the "
        "saved memory allows larger batches. No GPU was run here",
    ),
    Claim(
        "Works for β₂ of 0.95, 0.99 and 0.999, where bf16 states fail",
        "beta2",
        _states,
        "Whether a state decays is arithmetic and should not differ; its cost in loss depends on the run",
    ),
    Claim(
        "EDQ follows what is lost in updates, and tells strategies apart",
        "strategies",
        _tells_apart,
        "EDQ of one step trusts the stored state; only EDQ against the oracle shows an error in that state",
    ),
    Claim(
        "Left open: does EDQ predict final quality?",
        "quality",
        _foretells,
        "Across rates, the rate itself confounds the correlation; within one rate there are few strategies",
    ),
)
