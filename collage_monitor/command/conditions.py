"""Conditions on which a check of a run fails, as words: losing-updates, "edq<0.9", "forecast-lost>0.25".

`check` and `report` take them. The words are fixed: pipelines of users hold them
(`tests/contract/test_conditions.py`).
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import click

from collage_monitor import wire
from collage_monitor.diagnosis import GRAVITY, finite
from collage_monitor.forecast import Forecast
from collage_monitor.metrics import is_metric
from collage_monitor.schedule import RateSchedule, parse_schedule
from collage_monitor.strategies import STRATEGIES

__all__ = ["Condition", "Facts", "Outcome", "fail_if", "parse_condition", "schedule_option", "write_junit"]

_SHORT: Final = {"edq": "edq_ratio", "lost": "lost_update_ratio"}
_FORECAST: Final = ("forecast-lost", "forecast-onset")
_WORDS: Final = {word.replace(" ", "-"): (word,) for word in GRAVITY} | {
    "problem": GRAVITY,
    "unknown": ("unknown",),
}
_COMPARISON: Final = re.compile(r"\s*([\w./-]+?)\s*(<=|>=|<|>)\s*(\S+)\s*")
_UNPRINTABLE: Final = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CANNOT_TELL: Final = "fails, because nobody can tell"


@dataclass(frozen=True)
class Facts:
    """The facts that conditions check: a run, its overview with every metric, a forecast if one was requested."""

    run: wire.Run
    judged: wire.Overview
    forecast: Forecast | None = None

    def number(self, name: str) -> float | None:
        """The number that a condition names; None if it is unknown."""
        model, own = self.judged.numbers, self.forecast.strategies[0] if self.forecast is not None else None
        if name == "forecast-lost":
            return own.lost if own is not None else None
        if name == "forecast-onset":
            steps = self.forecast.steps if self.forecast is not None else 0
            return None if own is None else 1.0 if own.onset is None else own.onset / steps
        edq = finite(model.get("edq_ratio"))
        if name == "lost" and self._rounds_at_random:
            return None if edq is None else 1.0 - edq
        return finite(model.get(_SHORT.get(name, name)))

    @property
    def _rounds_at_random(self) -> bool:
        """Then one step's lost share misjudges the run; the average loss is 1 − EDQ."""
        watch = self.run.watch
        name = watch.shown_strategy if watch is not None else None
        return name in STRATEGIES and STRATEGIES[name].stochastic


@dataclass(frozen=True)
class Condition:
    """A word that may be said of a run, or a number beyond a bound: then the check fails."""

    text: str
    name: str
    compares: str = ""
    bound: float = 0.0

    @property
    def needs_forecast(self) -> bool:
        """Whether a schedule must be known."""
        return self.name in _FORECAST

    def held_against(self, facts: Facts) -> Outcome:
        """Whether the run meets the condition; an unknown number counts as met."""
        if not self.compares:
            return self._word(facts)
        value = facts.number(self.name)
        if value is None:
            return Outcome(
                facts.run.name, self.text, "error", f"{self.name} is not known of this run: it {_CANNOT_TELL}"
            )
        met = {
            "<": value < self.bound,
            ">": value > self.bound,
            "<=": value <= self.bound,
            ">=": value >= self.bound,
        }[self.compares]
        return Outcome(facts.run.name, self.text, "failed" if met else "passed", f"{self.name} is {value:.4g}")

    def _word(self, facts: Facts) -> Outcome:
        words = _WORDS[self.name]
        said = [finding for finding in facts.judged.findings if finding.health in words]
        if said:
            return Outcome(facts.run.name, self.text, "failed", f"{facts.judged.health}: {facts.judged.text}")
        if not facts.judged.numbers:
            return Outcome(
                facts.run.name, self.text, "error", f"nothing was measured of this run: it {_CANNOT_TELL}"
            )
        return Outcome(facts.run.name, self.text, "passed", f"{facts.judged.health}: {facts.judged.text}")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one condition for one run."""

    run: str
    condition: str
    status: Literal["passed", "failed", "error"]
    text: str


def parse_condition(text: str) -> Condition:
    """A condition from a word, or from a number's name, a comparison and a bound.

    Raises:
        click.BadParameter: it is none; the message says what to write.
    """
    text = text.strip()
    if text in _WORDS:
        return Condition(text, text)
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is none: write a word ({', '.join(_WORDS)}) or such as edq<0.9")
    name, compares, bound = found.groups()
    if name not in _SHORT and name not in _FORECAST and not is_metric(name):
        known = ", ".join([*_SHORT, *_FORECAST])
        raise click.BadParameter(f"{name!r} is no number of a run: write {known}, or a key of docs/metrics.md")
    try:
        number = float(bound)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise click.BadParameter(f"{text!r} ends in {bound!r}, which is no number")
    return Condition(text, name, compares, number)


def _conditions(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> list[Condition]:
    return [parse_condition(text) for text in texts]


def _schedule(_context: click.Context, _parameter: click.Parameter, text: str | None) -> RateSchedule | None:
    try:
        return None if text is None else parse_schedule(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


fail_if = click.option(
    "--fail-if",
    "conditions",
    callback=_conditions,
    metavar="CONDITION",
    multiple=True,
    default=("problem",),
    show_default=True,
    help="When to end with status 1: a word, such as losing-updates, or 'edq<0.9'. Repeat it.",
)
"""The option of the verbs that end by conditions."""


schedule_option = click.option(
    "--schedule",
    callback=_schedule,
    metavar="SCHEDULE",
    help="Schedule of the learning rate for the forecast: cosine:RATE:WARMUP:STEPS; also linear, wsd, constant.",
)
"""The option of the verbs that foretell."""


def write_junit(path: Path, outcomes: Sequence[Outcome], said: str, seconds: float) -> None:
    """Write outcomes as JUnit XML, each as a test case, with the runs' judgements as output.

    Raises:
        click.ClickException: the file cannot be written.
    """
    counts = {status: sum(own.status == status for own in outcomes) for status in ("failed", "error")}
    attributes = {
        "name": "collage-monitor check",
        "tests": str(len(outcomes)),
        "failures": str(counts["failed"]),
        "errors": str(counts["error"]),
        "time": f"{seconds:.3f}",
    }
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    for own in outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": _printable(own.run), "name": own.condition, "time": "0"}
        )
        if own.status != "passed":
            kind = "failure" if own.status == "failed" else "error"
            ElementTree.SubElement(case, kind, {"message": _printable(own.text)})
    ElementTree.SubElement(suite, "system-out").text = _printable(said)
    ElementTree.indent(root)
    try:
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise click.ClickException(f"cannot write {path} ({error.strerror or error}); another --junit?") from error


def _printable(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
