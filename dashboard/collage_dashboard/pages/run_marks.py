"""What the curves of a run mark: resumes, alerts, gaps, notes; in each its alert's threshold, and its onset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import plotly.graph_objects as go
from dash import html

from collage_dashboard.descriptions import describe, finite, value_text
from collage_dashboard.figures.series import mark_events, shade_beyond
from collage_monitor import wire
from collage_monitor.alerts import ALERTS, Condition
from collage_monitor.judgement import EDQ_TOLERANCE
from collage_monitor.metrics import split_key
from collage_monitor.onset import find_onset

__all__ = ["Marks", "mark_curve", "marks_in_words", "marks_of", "place_marks"]

Marks = Sequence[tuple[int, str]]
"""Steps of a run, and what happened there."""
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


def place_marks(marks: Marks, answer: wire.Series) -> list[tuple[float, str]]:
    """The marks on the axis of a curve: each at its first point from there on; marks outside are left out.

    Those at one place are one mark: of two that lie upon each other only one could be read.
    """
    points = [(step, finite(at)) for step, at in zip(answer.steps, answer.positions, strict=True)]
    found: dict[float, str] = {}
    for step, text in marks:
        at = next((at for known, at in points if known >= step and at is not None), None)
        if at is not None and (not answer.first_steps or step >= answer.first_steps[0]):
            place = float(step) if answer.axis == "step" else at
            told = f"{text}, step {step:,}"
            found[place] = f"{found[place]} · {told}" if place in found else told
    return list(found.items())


def mark_curve(
    figure: go.Figure, metric: str, answer: wire.Series, strategy: str | None, marks: Marks = ()
) -> go.Figure:
    """The figure of one curve with its alert's threshold as a band, these marks, and where it changed abruptly.

    `strategy`: that of the run; an alert may judge some only. The onset is that of the points on the screen: a zoom
    places it more exactly, and of the model's EDQ it is among the marks of the run already.
    """
    if not figure.data:
        return figure
    found = _condition_on(metric, strategy) if answer.layer is None else None
    if found is not None:
        alert, condition = found
        figure = shade_beyond(
            figure, condition, f"{alert}: {_beyond(condition, metric)}", describe(metric).drawn_scale
        )
    places = dict(place_marks(marks, answer))
    if metric != "edq_ratio" or answer.layer is not None:
        for place, told in _onset_of(metric, answer):
            places[place] = f"{places[place]} · {told}" if place in places else told
    return mark_events(figure, list(places.items()))


def _condition_on(metric: str, strategy: str | None) -> tuple[str, Condition] | None:
    """The alert that holds a run's newest value of a metric against a threshold, and its condition."""
    name, label = split_key(metric)
    labels = {"key": metric, "strategy": strategy or "", "state": label or "", "window": label or ""}
    for alert in ALERTS.values():
        for condition in alert.conditions:
            about = condition.series.removeprefix("collage_")
            by_key = about == "finding" and ("key", "=", metric) in condition.labels
            simple = condition.measure in {"value", "distance", "recent"}
            if simple and (by_key or about == name) and condition.matches(labels.items()):
                return alert.name, condition
    return None


def _beyond(condition: Condition, metric: str) -> str:
    """'below 0.9', 'above 50.0 %', 'further than 0.25 from 1'."""
    if condition.measure == "distance":
        return f"further than {condition.threshold:g} from 1"
    share = describe(metric).unit == "share"
    bound = value_text(metric, condition.threshold) if share else f"{condition.threshold:g}"
    return f"{'below' if condition.comparison == '<' else 'above'} {bound}"


def _onset_of(metric: str, answer: wire.Series) -> list[tuple[float, str]]:
    """Where the curve changed abruptly, if it did, on its axis, and what it was before and after."""
    values = [float("nan") if (value := finite(entry)) is None else value for entry in answer.values]
    description = describe(metric)
    least = EDQ_TOLERANCE if description.ideal is not None else 0.0
    onset = find_onset(answer.first_steps, values, least=least)
    if onset is None:
        return []
    points = zip(answer.first_steps, answer.positions, strict=True)
    place = finite(next(at for step, at in points if step >= onset.first_changed))
    old, new = (value_text(metric, float(level), 3) for level in (onset.before, onset.after))
    return (
        []
        if place is None
        else [(place, f"{description.title} changed at step {onset.first_changed:,}: {old} before, {new} after")]
    )
