"""A study run again with other seeds: its trials, and whether the answer is the same.

Records of a repeat lie beside the first ones, and none is overwritten (`tests/studies/test_repeats.py`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from pathlib import Path
from typing import Final

import msgspec
from collage_demo.recipe import Plan

from collage_monitor.seeds import SeedValue, difference, mean_over_seeds
from collage_studies.number_words import estimate, listed
from collage_studies.study import MarkdownTable, Record, Study, Trial
from collage_studies.trial_records import RecordFile

__all__ = [
    "Repeat",
    "RepeatComparison",
    "compare_repeat",
    "record_file",
    "repeat_section",
    "repeats_of",
    "reseeded",
    "seed_of",
]

_CHANCE: Final = 0.05
"""This share of differences lies outside a 95 % interval by chance."""
_REFERENCE: Final = Plan("plain", "float32")
_LOSS: Final = "validation_loss"


@dataclass(frozen=True)
class Repeat:
    """The records of a study whose trials began with another seed, and where they are kept."""

    file: Path
    records: Sequence[Record]


def seed_of(trial: Trial) -> int | None:
    """The seed of a training's recipe or of a computation's settings; None where nothing is random."""
    return trial.settings.get("seed") if trial.recipe is None else trial.recipe.seed


def reseeded(trials: Sequence[Trial], first_seed: int) -> list[Trial]:
    """The trials with their seeds moved so that the first is `first_seed`.

    Raises:
        ValueError: a trial has no seed, or a seed is both an old and a new one.
    """
    seeds = [seed for trial in trials if (seed := seed_of(trial)) is not None]
    if len(seeds) < len(trials):
        raise ValueError("it has trials without a seed, which would give the same result again")
    moved = first_seed - min(seeds)
    if set(seeds) & {seed + moved for seed in seeds}:
        raise ValueError(f"seeds from {first_seed} on overlap its own, {min(seeds)} to {max(seeds)}")
    return [_moved(trial, moved) for trial in trials]


def _moved(trial: Trial, moved: int) -> Trial:
    old = seed_of(trial)
    assert old is not None
    new = old + moved
    name, told = re.subn(rf"\bseed {old}\b", f"seed {new}", trial.name)
    name = name if told else f"{name}, seed {new}"
    if trial.recipe is None:
        return msgspec.structs.replace(trial, name=name, settings={**trial.settings, "seed": new})
    return msgspec.structs.replace(trial, name=name, recipe=replace(trial.recipe, seed=new))


def record_file(name: str, folder: Path, first_seed: int | None = None) -> RecordFile:
    """The records of a study under FOLDER/data; each repeat has a file of its own."""
    repeat = "" if first_seed is None else f"-seed-{first_seed}"
    return RecordFile(folder / "data" / f"{name}{repeat}.jsonl")


def repeats_of(study: Study, trials: Sequence[Trial], folder: Path) -> list[Repeat]:
    """The complete repeats under FOLDER/data, ordered by first seed."""
    found = {}
    for path in (folder / "data").glob(f"{study.name}-seed-*.jsonl"):
        first_seed = int(path.stem.rpartition("-")[2])
        file, wanted = RecordFile(path), reseeded(trials, first_seed)
        if not file.missing(wanted):
            found[first_seed] = Repeat(path, file.of(wanted))
    return [found[first_seed] for first_seed in sorted(found)]


@dataclass(frozen=True)
class RepeatComparison:
    """A repeat held against the first run. outside: table rows of the means, among `count`, that differ beyond
    their interval."""

    seeds: Sequence[int]
    count: int
    outside: Sequence[Sequence[str]]

    @property
    def same(self) -> bool:
        """Whether no more means differ than chance explains."""
        return len(self.outside) <= self.most_by_chance

    @property
    def within(self) -> int:
        """How many means differ by no more than their interval."""
        return self.count - len(self.outside)

    @property
    def most_by_chance(self) -> int:
        """The most means that differ by more in 95 of 100 repeats, if nothing but the seed differs."""
        reached, found = 0.0, -1
        while reached < 1 - _CHANCE:
            found += 1
            reached += comb(self.count, found) * _CHANCE**found * (1 - _CHANCE) ** (self.count - found)
        return found

    @property
    def sentence(self) -> str:
        """Whether the repeat agrees, and how many of its means do."""
        return (
            f"The repeat {'agrees' if self.same else 'does not agree'}: {self.within} of {self.count} means differ "
            "from the first run's by no more than the 95 % interval of the difference. Chance explains up to "
            f"{self.most_by_chance} that differ by more."
        )


def compare_repeat(study: Study, records: Sequence[Record], repeat: Repeat) -> RepeatComparison:
    """The repeat's means by configuration, held against the first run's."""
    seeds = sorted({seed for record in repeat.records if (seed := seed_of(record.trial)) is not None})
    rows, count = [], 0
    for name in study.repeat_metrics:
        first, again = (_by_configuration(entries, name) for entries in (records, repeat.records))
        for where, values in first.items():
            gap = difference(again.get(where, []), values)
            if gap is None or gap.low is None or gap.high is None:
                continue
            count += 1
            if not gap.low <= 0 <= gap.high:
                means = [mean_over_seeds([entry.value for entry in side]) for side in (values, again[where])]
                what = f"gap of {name} to fp32" if name == _LOSS and _has_reference(records) else name
                rows.append([_name(records, where), what, *(estimate(mean, ".4g") for mean in means)])
    return RepeatComparison(seeds, count, rows)


def repeat_section(study: Study, records: Sequence[Record], repeat: Repeat) -> list[str | MarkdownTable]:
    """Whether the repeat agrees, its own answer, and the means that differ beyond their interval."""
    found = compare_repeat(study, records, repeat)
    text = (
        f"The study was run again with seeds {listed(map(str, found.seeds))} "
        f"([`data/{repeat.file.name}`](data/{repeat.file.name})). {found.sentence}"
    )
    answer = f"**The repeat's answer.** {study.page(repeat.records).answer}"
    outside = MarkdownTable(["outside the interval", "number", "first", "repeated"], found.outside)
    return [text, answer, outside] if found.outside else [text, answer]


def _by_configuration(records: Sequence[Record], name: str) -> Mapping[Hashable, list[SeedValue]]:
    """A value of each configuration, that is a trial without its seed. A loss is taken less that of fp32 with the
    same seed, where there is one: what the seed does to both says nothing about a strategy."""
    known = {(_configuration(record.trial), seed_of(record.trial)): _value(record, name) for record in records}
    found: dict[Hashable, list[SeedValue]] = {}
    against = name == _LOSS and _has_reference(records)
    for record in records:
        where, seed, base = _configuration(record.trial), seed_of(record.trial), 0.0
        value = _value(record, name)
        if against:
            if record.trial.plan == _REFERENCE:
                continue
            reference = known.get((_configuration(record.trial, _REFERENCE), seed))
            if reference is None:
                continue
            base = reference
        if value is not None:
            found.setdefault(where, []).append(SeedValue(value - base, None, seed))
    return found


def _has_reference(records: Sequence[Record]) -> bool:
    return any(record.trial.plan == _REFERENCE for record in records)


def _configuration(trial: Trial, plan: Plan | None = None) -> bytes:
    recipe = None if trial.recipe is None else {**asdict(trial.recipe), "seed": 0}
    settings = {name: value for name, value in trial.settings.items() if name != "seed"}
    return msgspec.json.encode([plan or trial.plan, recipe, settings], order="sorted")


def _name(records: Sequence[Record], where: Hashable) -> str:
    trial = next(record.trial for record in records if _configuration(record.trial) == where)
    return trial.name.replace(f", seed {seed_of(trial)}", "")


def _value(record: Record, name: str) -> float | None:
    """A value, a merged metric, or the mean of a curve."""
    for numbers in (record.values, record.merged):
        if name in numbers:
            return numbers[name]
    known = [value for value in record.curves[name].values if value is not None] if name in record.curves else []
    return sum(known) / len(known) if known else None
