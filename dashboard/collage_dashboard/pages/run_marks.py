"""What the curves of a run mark: resumes, alerts, gaps, notes; in each its alert's threshold, and its onset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import plotly.graph_objects as go
from dash import html

from collage_dashboard.descriptions import describe
from collage_dashboard.figures.series import mark_events, shade_beyond
from collage_dashboard.figures.style import ACCENT
from collage_monitor import wire
from collage_monitor.alerts import ALERTS, Condition
from collage_monitor.diagnosis import EDQ_TOLERANCE, finite
from collage_monitor.metrics import split_key
from collage_monitor.number_text import value_text
from collage_monitor.onset import find_onset

__all__ = ["Marks", "Story", "cured_at", "mark_curve", "marks_in_words", "marks_of", "place_marks", "step_of_onset"]

Marks = Sequence[tuple[int, str]]
"""Steps of a run, and what happened there."""


class Story(msgspec.Struct, frozen=True):
    """What the charts of a run show besides its numbers.

    `strategy` and its `colour`; `since`: the onset that the headline names; `beside`: what second writers log.
    `cured`: the first step after weights or states were last begun to be kept otherwise.
    """

    colour: str = ACCENT
    strategy: str | None = None
    since: int | None = None
    cured: int | None = None
    beside: Sequence[str] = ()
    marks: Marks = ()


_MOST_MARKS: Final = 12
_UNMARKED: Final = frozenset({"retention", "alert_resolved", "continuation"})
_EVENTS: Final = {
    "conversion": "weights converted",
    "expectation": "expectation broken",
    "resume_loss": "lost at a resume",
    "rank_twice": "rank reported twice",
    "gap": "reports lost",
    "restored": "server restored",
    "replica_mismatch": "replicas differ",
}


def marks_of(events: Sequence[wire.Event], changes: Sequence[wire.EdqChange] = ()) -> list[tuple[int, str]]:
    """The newest events that may explain a curve: resumes, alerts, gaps, notes, and abrupt changes of EDQ."""
    found: dict[tuple[int, str], None] = {}
    for event in events:
        first = event.kind == "attempt" and (event.attempt or 1) <= 1
        if event.step is not None and event.kind not in _UNMARKED and not first:
            found[event.step, _what(event)] = None
    marks = list(found)[-_MOST_MARKS:]
    for change in changes[-_MOST_MARKS:]:
        way = "falls" if change.after < change.before else "rises"
        marks.append((change.step, f"EDQ {way} to {value_text('edq_ratio', change.after)}"))
    return marks


def cured_at(events: Sequence[wire.Event]) -> int | None:
    """The first step after the newest conversion, or launch that keeps weights or states otherwise."""
    launched = {event.attempt: event.step for event in events if event.kind == "attempt"}
    found = [event.step + 1 for event in events if event.kind == "conversion" and event.step is not None]
    found += [at for event in events if event.kind == "kept_otherwise" and (at := launched.get(event.attempt))]
    return max(found, default=None)


def _what(event: wire.Event) -> str:
    if event.kind == "attempt":
        return f"attempt {event.attempt}"
    if event.kind == "alert":
        return event.text.partition(" ")[0]
    if event.kind == "note":
        return f"note by {event.text[:60]}"
    return _EVENTS.get(event.kind, event.kind.replace("_", " "))


def marks_in_words(marks: Marks) -> Any:
    """The marks of the curves, in a line; empty if there are none."""
    if not marks:
        return None
    told = " · ".join(f"{text} at step {step:,}" for step, text in marks)
    return html.P(f"Marked in the curves: {told}", className="crumbs")


def place_marks(marks: Marks, answer: wire.Series | wire.Heatmap) -> list[tuple[float, str]]:
    """The marks on the axis of a curve or heatmap: each at its first point from there on, or left out.

    Those at one place are one mark: of two that lie upon each other only one could be read.
    """
    found: dict[float, str] = {}
    for step, text in marks:
        at = _place_of(step, answer)
        if at is not None and (not answer.first_steps or step >= answer.first_steps[0]):
            place = float(step) if answer.axis == "step" else at
            told = f"{text}, step {step:,}"
            found[place] = f"{found[place]} · {told}" if place in found else told
    return list(found.items())


def _place_of(step: int, answer: wire.Series | wire.Heatmap) -> float | None:
    """Where a curve has its first point at this step or later, on its axis."""
    points = ((known, finite(at)) for known, at in zip(answer.steps, answer.positions or answer.steps, strict=True))
    return next((at for known, at in points if known >= step and at is not None), None)


def mark_curve(figure: go.Figure, metric: str, answer: wire.Series, story: Story) -> go.Figure:
    """The figure of one curve with its alert's threshold as a band, the run's marks, and where it changed abruptly.

    An alert may judge some strategies only. The onset is that of the points on the screen: a zoom places it more
    exactly, and of the model's EDQ it is among the marks of the run already. Where points merge steps, it is the
    headline's if that lies within the same point.
    """
    if not figure.data:
        return figure
    for condition in _judged_by(metric, story.strategy) if answer.layer is None else ():
        figure = shade_beyond(figure, condition, describe(metric).drawn_scale)
    places = dict(place_marks(story.marks, answer))
    if metric != "edq_ratio" or answer.layer is not None:
        for place, told in _onset_of(metric, answer, story.since):
            places[place] = f"{places[place]} · {told}" if place in places else told
    return mark_events(figure, list(places.items()))


def _judged_by(metric: str, strategy: str | None) -> list[Condition]:
    """Where the alert begins that holds a run's metric against a threshold."""
    name, label = split_key(metric)
    labels = {"strategy": strategy or "", "state": label or "", "window": label or ""}
    for alert in ALERTS.values():
        found = [
            condition
            for condition in alert.drawn
            if condition.series.removeprefix("collage_") in (name, metric)
            and condition.measure in {"value", "recent"}
            and condition.matches(labels.items())
        ]
        if found:
            return found
    return []


def _onset_of(metric: str, answer: wire.Series, since: int | None) -> list[tuple[float, str]]:
    """Where the curve changed abruptly, if it did, on its axis, and what it was before and after."""
    values = [float("nan") if (value := finite(entry)) is None else value for entry in answer.values]
    description = describe(metric)
    least = EDQ_TOLERANCE if description.ideal is not None else 0.0
    onset = find_onset(answer.first_steps, values, least=least, last_steps=answer.steps)
    if onset is None:
        return []
    step = step_of_onset(onset.last_before, onset.first_changed, since)
    old, new = (value_text(metric, float(level), 3) for level in (onset.before, onset.after))
    merged = dict(zip(answer.steps, answer.first_steps, strict=True))[onset.first_changed] < onset.first_changed
    when = f"between steps {onset.last_before:,} and {step:,}" if merged and step != since else f"at step {step:,}"
    found = f"{description.title} changed {when}: {old} before, {new} after"
    place = float(step) if answer.axis == "step" else _place_of(step, answer)
    return [] if place is None else [(place, found)]


def step_of_onset(last_before: int, first_changed: int, since: int | None) -> int:
    """The step at which a change in this interval is placed: that of the run's headline where it lies within,
    else the last, by which it had happened for certain.
    """
    return since if since is not None and last_before < since <= first_changed else first_changed
