"""The curves of a run, and what they mark: resumes, alerts, gaps, notes; its alert's threshold, and its onset.

Loss, EDQ and updates lost stand side by side on its first screen, the others behind tabs. `run.py` lays out what
acts on all of them, `run_content.py` the charts (`tests/dashboard/figures/test_marks.py`). Ids are fixed: callbacks
of `run.py`, `assets/figures.js` and tests find parts by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import dash_mantine_components as dmc
import msgspec
import plotly.graph_objects as go
from dash import html

from collage_dashboard.components import (
    curve_controls,
    labelled,
    menu,
    segments,
    select,
)
from collage_dashboard.descriptions import EVENTS, describe
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.heatmap import short_layer
from collage_dashboard.figures.series import mark_events, shade_beyond
from collage_dashboard.figures.style import ACCENT
from collage_dashboard.pages.before_after import change_controls
from collage_dashboard.view import View
from collage_dashboard.zoom import POINTS, Steps
from collage_monitor import wire
from collage_monitor.alerts import ALERTS, Condition
from collage_monitor.client import Client
from collage_monitor.diagnosis import EDQ_TOLERANCE, finite
from collage_monitor.metrics import split_key
from collage_monitor.number_text import value_text
from collage_monitor.onset import find_onset

__all__ = [
    "FIRST",
    "FIRST_PIXELS",
    "MARK_KEYS",
    "WHOLE_MODEL",
    "Story",
    "cured_at",
    "draw_curve",
    "marks_in_words",
    "marks_of",
    "place_marks",
    "run_controls",
    "series_between",
]

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
    return EVENTS[event.kind].lower()


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


def _marked(figure: go.Figure, metric: str, answer: wire.Series, story: Story) -> go.Figure:
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
    step = _step_of_onset(onset.last_before, onset.first_changed, since)
    old, new = (value_text(metric, float(level), 3) for level in (onset.before, onset.after))
    merged = dict(zip(answer.steps, answer.first_steps, strict=True))[onset.first_changed] < onset.first_changed
    when = f"between steps {onset.last_before:,} and {step:,}" if merged and step != since else f"at step {step:,}"
    found = f"{description.title} changed {when}: {old} before, {new} after"
    place = float(step) if answer.axis == "step" else _place_of(step, answer)
    return [] if place is None else [(place, found)]


def _step_of_onset(last_before: int, first_changed: int, since: int | None) -> int:
    """The step at which a change in this interval is placed: that of the run's headline where it lies within,
    else the last, by which it had happened for certain.
    """
    return since if since is not None and last_before < since <= first_changed else first_changed


FIRST: Final = ("loss", "edq_ratio", "lost_update_ratio")
"""The curves of the first screen, from left to right."""
FIRST_PIXELS: Final = 204
"""Their height: at least 160 of it are the curve's."""
WHOLE_MODEL: Final = "whole model"
MARK_KEYS: Final = "; n and p ask what changed at the next and the previous mark"


def run_controls(view: View, layers: list[str]) -> html.Details:
    """Behind one button what acts on every chart of the page; beside it the step that is asked about."""
    chosen = view.layer if view.layer in layers else WHOLE_MODEL
    offered = [{"value": WHOLE_MODEL, "label": "Whole model"}]
    offered += [{"value": name, "label": short_layer(name)} for name in layers]
    layer = select("run-layer", "Curves of", offered, chosen, searchable=True, allowDeselect=False, limit=200)
    schedule = dmc.TextInput(
        id="run-schedule",
        value=view.schedule,
        placeholder="cosine:3e-4:100:10000",
        debounce=True,
        size="xs",
        w=220,
        **{"aria-label": "Schedule of the learning rate: kind, rate, warm-up, steps"},
    )
    controls = [
        labelled("Curves of", layer),
        *curve_controls("run", view),
        segments("run-order", "Layers", {"depth": "By depth", "worst": "Worst first"}, view.order),
        segments("run-rows", "Grouped", {"all": "No", "block": "By block", "type": "By module type"}, view.rows),
        *change_controls(view),
        labelled("Learning-rate schedule, for a forecast", schedule),
    ]
    return menu("Axes", *controls)


def draw_curve(
    metric: str, name: str, answer: wire.Series, view: View, story: Story, *, is_first: bool = False
) -> go.Figure:
    """One curve of a run, under its name, with what is marked; on the first screen on a fixed scale."""
    line = NamedCurve(name, story.colour, answer)
    height = FIRST_PIXELS if is_first else 300
    drawn = curves(metric, [line], smoothing=view.smoothing, scale=view.scale, height=height, is_fixed=is_first)
    return _marked(drawn, metric, answer, story)


def series_between(
    client: Client, view: View, metrics: str | Sequence[str], layer: str | None, steps: Steps
) -> wire.Series:
    """One metric or several of the view's run, on its axis, between `steps`."""
    return client.series(
        view.runs[0],
        metrics,
        layer=layer,
        axis=view.axis,
        points=POINTS,
        first_step=steps[0],
        last_step=steps[1],
    )
