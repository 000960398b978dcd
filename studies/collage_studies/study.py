"""The definition of a study: a question, trials that answer it, and a page written only from their records.

A trial is one training, or one computation, in a process of its own. Its record is all that later steps see of it:
page and plots can be drawn again from records at any time, without training anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from collage_demo.recipe import Plan, Recipe

__all__ = [
    "Curve",
    "MarkdownTable",
    "Page",
    "Picture",
    "Plot",
    "PlotCurve",
    "Record",
    "RecordLine",
    "ReportTarget",
    "Study",
    "Trial",
]


class Trial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of a study, by all that decides its outcome.

    `settings` are those of a computation; a training has a plan and a recipe. `curves` names the metrics and
    scalars whose curves over steps are kept from the server, METRIC@TYPE for one type of module.
    """

    name: str
    plan: Plan | None = None
    recipe: Recipe | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    curves: tuple[str, ...] = ()


class Curve(msgspec.Struct, frozen=True):
    """A metric over steps; None where it is undefined."""

    steps: list[int]
    values: list[float | None]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of a trial. `values`: numbers by name; `merged`: the run's metrics, all measured steps merged.
    `words`: the product's texts about it, verbatim.

    `trial` is kept whole: a record counts only for a trial that is equal to it. None in `values`: undefined.
    """

    trial: Trial
    versions: dict[str, str]
    cpu_seconds: float
    values: dict[str, float | None] = msgspec.field(default_factory=dict)
    merged: dict[str, float | None] = msgspec.field(default_factory=dict)
    curves: dict[str, Curve] = msgspec.field(default_factory=dict)
    words: dict[str, str] = msgspec.field(default_factory=dict)
    run_id: str


class RecordLine(msgspec.Struct, frozen=True, tag="record"):
    """The last line that a trial's process prints."""

    record: Record


@dataclass(frozen=True)
class ReportTarget:
    """Where a trial's process sends its reports: like any user's training, to a server, spooling in `folder`."""

    server_url: str | None
    folder: Path
    group: str


@dataclass(frozen=True)
class MarkdownTable:
    """Cells are text, already formatted."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class PlotCurve:
    """A curve of a plot, or dots; `low` and `high` bound its interval, or are empty."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture with one axis of each kind, and curves by their names."""

    file: str
    title: str
    x: str
    y: str
    curves: Mapping[str, PlotCurve]
    x_scale: Literal["linear", "log", "symlog"] = "linear"
    y_scale: Literal["linear", "log", "symlog"] = "linear"
    lines: bool = True


@dataclass(frozen=True)
class Picture:
    """A picture that is not drawn from records, such as of the dashboard: shown where its file is there."""

    file: str
    title: str


@dataclass(frozen=True)
class Page:
    """The result of a study. `answer`: sentences made from its numbers; then the evidence and the limits."""

    answer: str
    evidence: Sequence[str | MarkdownTable | Plot | Picture]
    limits: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study, named by its question.

    short: the result in two sentences for a tired reader; a test checks them against the answer. trials(quick): the
    trials, a fraction of them if quick. run(trial, reporting): the record, in the trial's own process.
    page(records): the page made from them. The study's own records come first, then those of the studies that it
    `reads`, if there are any. `repeat_metrics`: the values, merged metrics and curves for comparing a repeat with
    other seeds.
    """

    name: str
    title: str
    short: str
    question: str
    method: str
    trials: Callable[[bool], Sequence[Trial]]
    run: Callable[[Trial, ReportTarget], Record]
    page: Callable[[Sequence[Record]], Page]
    reads: tuple[str, ...] = ()
    repeat_metrics: tuple[str, ...] = ("validation_loss", "edq_ratio")
