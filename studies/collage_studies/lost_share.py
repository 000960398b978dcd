"""The cost of a lost share of updates: evidence for `CollageUpdatesLost` from all trainings with a twin in fp32.

`python -m collage_studies.lost_share` prints it from docs/studies; `--write docs/false-alarms.md` puts it between
that page's markers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Final

import click
import msgspec
from collage_demo.recipe import Plan

from collage_monitor.alerts import alert
from collage_monitor.diagnosis import LOST_TOLERANCE
from collage_monitor.strategies import STRATEGIES
from collage_studies.catalogue import STUDY_NAMES
from collage_studies.number_words import estimate, listed
from collage_studies.pages import table_text
from collage_studies.studies.beta2 import NOTICEABLE_GAP
from collage_studies.studies.eight_bit import EMULATED_FORMATS
from collage_studies.studies.quality import LOST, STEP, WINDOW, Configuration, configurations
from collage_studies.study import MarkdownTable, Record, Trial
from collage_studies.summary import records_of

__all__ = [
    "END",
    "START",
    "evidence",
    "main",
    "replace_between_markers",
]

START, END = "<!-- lost share -->", "<!-- end of lost share -->"
_LOST_BOUND, _EDQ_BOUND = (alert(name).drawn[0].threshold for name in ("CollageUpdatesLost", "CollageEdqLow"))
_EDGES: Final = (0.0, LOST_TOLERANCE, _LOST_BOUND, 0.4, 0.5, 0.6, 1.0)
"""Edges of the table's rows: the bounds of the judgement and of the alert, and some above them."""


def evidence(found: Mapping[str, Sequence[Record]]) -> str:
    """The table and the sentences on its numbers, from the records of studies by name."""
    used = [name for name, records in found.items() if configurations(records)]
    entries = configurations(_each_once([record for name in used for record in found[name]]))
    nearest = [entry for entry in entries if not _rounds_at_random(entry.plan)]
    at_random = [entry for entry in entries if _rounds_at_random(entry.plan)]
    parts = [[entry for entry in nearest if low <= _lost(entry) < high] for low, high in pairwise(_EDGES)]
    rows = [*(_row("to nearest", part) for part in parts if part), _row("at random", at_random)]
    head = ["rounding", "updates lost in a step", "configurations", "EDQ", "gap to fp32", "above it beyond chance"]
    text = (
        f"{sum(len(entry.runs) for entry in entries)} trainings of {len(entries)} configurations (a strategy in a "
        "setting) have a twin in fp32 with the same seed and batches. They come from the studies "
        f"{listed(f'[{name}](studies/{name}.md)' for name in used)}. Lost updates and EDQ are merged over all "
        "measured steps. A gap is the difference of the last validation losses in nats, as a mean over seeds. It "
        "is beyond chance where its whole 95 % interval is above 0."
    )
    sentences = [_beside_the_bound(nearest), _by_edq(nearest), _over_a_window(at_random)]
    return "\n\n".join([text, table_text(MarkdownTable(head, rows)), "\n".join(f"- {told}" for told in sentences)])


def replace_between_markers(page: str, text: str) -> str:
    """The page with the text between its two markers.

    Raises:
        ValueError: a marker does not stand exactly once.
    """
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{text}\n{END}{after}"


def _each_once(records: Sequence[Record]) -> list[Record]:
    """The records, without trainings that an earlier study ran as well."""
    return list({_training(record.trial): record for record in reversed(records)}.values())[::-1]


def _training(trial: Trial) -> bytes:
    recipe = None if trial.recipe is None else asdict(trial.recipe)
    return msgspec.json.encode([trial.plan, recipe, trial.settings], order="sorted")


def _rounds_at_random(plan: Plan) -> bool:
    if plan.strategy in EMULATED_FORMATS:
        return EMULATED_FORMATS[plan.strategy][2]
    return plan.strategy in STRATEGIES and STRATEGIES[plan.strategy].stochastic


def _merged(entry: Configuration, name: str) -> float:
    value = entry.mean(lambda run: run.merged.get(name))
    assert value is not None, f"{entry.name} has no {name}"
    return value


def _lost(entry: Configuration) -> float:
    return _merged(entry, LOST)


def _row(rounding: str, entries: Sequence[Configuration]) -> list[str]:
    lost = [100 * _lost(entry) for entry in entries]
    return [
        rounding,
        f"up to {max(lost):.2g} %" if min(lost) < 100 * LOST_TOLERANCE else f"{_span(lost, '.2g')} %",
        str(len(entries)),
        _span([_merged(entry, STEP) for entry in entries], ".3f"),
        _span([entry.gap.value for entry in entries], "+.3f"),
        str(sum(entry.ends_worse for entry in entries)),
    ]


def _span(values: Sequence[float], form: str) -> str:
    low, high = (format(end, form) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def _beside_the_bound(nearest: Sequence[Configuration]) -> str:
    below = [entry for entry in nearest if _lost(entry) <= _LOST_BOUND]
    above = [entry for entry in nearest if _lost(entry) > _LOST_BOUND]
    worse = [entry for entry in above if entry.ends_worse]
    rest = [entry for entry in above if not entry.ends_worse]
    missed = [
        f"{entry.name}, {_percent(_lost(entry))} lost, {estimate(entry.gap, '+.4f')}"
        for entry in below
        if entry.ends_worse and entry.gap.value >= NOTICEABLE_GAP
    ]
    largest, smallest = max(map(_lost, below)), min(map(_lost, above))
    told = (
        f"Where rounding is to nearest, no configuration loses between {_percent(largest)} and "
        f"{_percent(smallest)}. Above {_percent(_LOST_BOUND)}, {len(worse)} of {len(above)} configurations end "
        f"above fp32 beyond chance, by up to {max(entry.gap.value for entry in worse):.2f} nats."
    )
    if rest:
        ends = _span([entry.gap.value for entry in rest], "+.3f")
        told += f" The seeds do not show a higher loss for {listed(entry.name for entry in rest)} (gaps of {ends})."
    ends = f"Among the {len(below)} below, these end above fp32 beyond chance by {NOTICEABLE_GAP:g} or more:"
    return f"{told} {ends} {'; '.join(missed) or 'none'}."


def _by_edq(nearest: Sequence[Configuration]) -> str:
    worse = [entry for entry in nearest if _lost(entry) > _LOST_BOUND and entry.ends_worse]
    low = [entry for entry in worse if _merged(entry, STEP) < _EDQ_BOUND]
    return (
        f"EDQ is no substitute: it is below {_EDQ_BOUND:g}, the bound of `CollageEdqLow`, in only {len(low)} of "
        f"those {len(worse)}."
    )


def _over_a_window(at_random: Sequence[Configuration]) -> str:
    name = f"lost_window_ratio/{WINDOW}"
    known = [(value, entry) for entry in at_random if (value := entry.mean(lambda run: run.merged.get(name)))]
    value, entry = max(known, key=lambda found: found[0])
    return (
        "Where rounding is random, the lost share says nothing about the loss, over one step or a window: over "
        f"{WINDOW} steps {entry.name} had lost {_percent(value)}, and its gap to fp32 is "
        f"{estimate(entry.gap, '+.4f')}."
    )


@click.command()
@click.option(
    "--studies", default="docs/studies", show_default=True, type=click.Path(path_type=Path), help="Studies' folder."
)
@click.option("--write", "page", type=click.Path(path_type=Path, exists=True), help="A page with the two markers.")
def main(studies: Path, page: Path | None) -> None:
    """Print the cost of a lost share of updates, and put it into a page."""
    text = evidence({name: records_of(name, studies) for name in STUDY_NAMES})
    click.echo(text)
    if page is not None:
        page.write_text(replace_between_markers(page.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
