"""The content of an incident's page: what fired, before and after, causes weighed, and the timeline.

`incident.py` fetches and calls it; it asks no server itself. Causes are weighed in
`collage_monitor.diagnosis.causes`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import dash_mantine_components as dmc
import msgspec
from dash import dcc, html

from collage_dashboard.components import badge, card, save_buttons
from collage_dashboard.descriptions import EVENTS, describe, when
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.series import mark_steps
from collage_dashboard.figures.style import GRAPH_CONFIG, strategy_colour
from collage_dashboard.pages.before_after import before_after_card
from collage_dashboard.tables import scrollable, table
from collage_dashboard.view import run_address
from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.diagnosis.causes import Breach, CauseVerdict, IncidentEvidence
from collage_monitor.number_text import UNDEFINED, count, share_text, value_text
from collage_monitor.onset import describe as describe_onset

__all__ = ["UNDO", "badges", "body", "duration_of", "head"]

UNDO: Final = "Undo acknowledgement"
_SEVERITIES: Final = {"info": "blue", "warning": "orange", "critical": "red"}
_MOST_EVENTS: Final = 200
_MOST_LAYERS: Final = 20
_VERDICTS: Final[dict[bool | None, tuple[str, str, str]]] = {
    True: ("✓", "supported", "Evidence for it: "),
    False: ("✗", "ruled-out", "Ruled out: "),
    None: ("?", "unknown", "Cannot be told from what was reported: "),
}
_LIKELIEST: Final = (True, None, False)


def badges(incident: wire.Incident) -> list[Any]:
    """State, severity, and who takes care of it."""
    firing = incident.state == "firing"
    found = [badge("open" if firing else "ended", _SEVERITIES.get(incident.severity, "gray") if firing else "gray")]
    found.append(badge(incident.severity, "gray"))
    if incident.acknowledged_by is not None:
        found.append(badge(f"acknowledged by {incident.acknowledged_by}", "blue"))
    if incident.silenced:
        found.append(badge("silenced", "gray"))
    return found


def duration_of(incident: wire.Incident) -> str:
    """'12 min'; an en dash while it lasts."""
    if incident.resolved_at is None:
        return UNDEFINED
    seconds = max(incident.resolved_at - incident.started_at, 0.0)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def head(incident: wire.Incident) -> html.Div:
    """The alert, its time, and the button to take care of it."""
    entry = ALERTS.get(incident.alert)
    summary = entry.summary if entry else incident.alert
    ended = f", ended {when(incident.resolved_at)}" if incident.resolved_at is not None else ", and is open"
    at = f" at step {count(incident.step)}" if incident.step is not None else ""
    source = "this server's evaluation" if incident.source == "server" else "Alertmanager"
    taken = incident.acknowledged_at is not None
    acknowledge = dmc.Button(UNDO if taken else "Acknowledge", id="incident-acknowledge", color="#1864ab")
    return html.Div(
        [
            html.Div(
                [
                    html.Span(
                        dmc.Title(f"{summary[0].upper()}{summary[1:]}", order=1, size="h2"), className="name"
                    ),
                    html.Div(className="spring"),
                    acknowledge,
                ],
                className="toolbar",
            ),
            html.Div(badges(incident), className="badges"),
            html.P(
                f"{incident.alert} fired {when(incident.started_at)}{at}{ended}. Found by {source}.",
                className="answer-line",
            ),
        ]
    )


def body(evidence: IncidentEvidence) -> list[Any]:
    """Everything below the head."""
    entry = ALERTS.get(evidence.incident.alert)
    parts: list[Any] = [_change(evidence)]
    left = [_picture(evidence), _compared(evidence), _layers(evidence)]
    right = [_causes(evidence), _first_step(evidence), _timeline(evidence)]
    if entry is not None:
        parts.append(html.P(entry.meaning, className="reasons"))
    parts.append(
        html.Div(
            [
                html.Div([part for part in column if part is not None], className="stack")
                for column in (left, right)
            ],
            className="incident-columns",
        )
    )
    return parts


def _change(evidence: IncidentEvidence) -> html.Div:
    """What changed, in a sentence; and the verdict when the alert fired."""
    return html.Div(
        [
            html.Div(html.Div(f"{_change_in_words(evidence)}.", className="verdict"), className="answer"),
            html.P(f"At the time: {evidence.incident.text}", className="reasons"),
        ]
    )


def _change_in_words(evidence: IncidentEvidence) -> str:
    onset, breach, resumed_at = evidence.onset, evidence.breach, evidence.resumed_at
    if evidence.incident.run_id is None:
        return "This alert is about the server, not about a run"
    if evidence.run is None:
        return "The run is gone, and with it what it reported"
    resumed = f". The run resumed at step {resumed_at:,}" if resumed_at is not None else ""
    if evidence.metric is None:
        return f"No curve shows what this alert watches{resumed}"
    title = describe(evidence.metric).title
    if onset is not None:
        at_once = f"At the resume at step {resumed_at:,}: " if resumed_at is not None else ""
        return at_once + describe_onset(onset, title, partial(value_text, evidence.metric))
    if breach is None:
        return f"The step at which {title} changed was not found{resumed}"
    if resumed_at is not None:
        return _at_the_resume(evidence.metric, breach, resumed_at)
    if breach.lasts:
        start = ", the first that was measured" if breach.from_start else ""
        return f"{title} is beyond the alert's threshold since step {breach.first_step:,}{start}"
    one = breach.first_step == breach.last_step
    where = f"at step {breach.first_step:,}" if one else f"from step {breach.first_step:,} to {breach.last_step:,}"
    return f"{title} was beyond the alert's threshold {where}"


def _at_the_resume(metric: str, breach: Breach, step: int) -> str:
    """'At the resume at step 170, 97.7 % of the residuals were dropped'."""
    if metric == "residual_dropped_ratio" and breach.value is not None:
        dropped = share_text(float(breach.value))
        return f"At the resume at step {step:,}, {dropped} of the residuals were dropped"
    before = f" from {value_text(metric, breach.before)}" if breach.before is not None else ""
    after = value_text(metric, breach.value)
    return f"At the resume at step {step:,}, {describe(metric).title} went{before} to {after}"


def _picture(evidence: IncidentEvidence) -> Any:
    if evidence.series is None or evidence.metric is None or not evidence.series.steps:
        return None
    watch = evidence.watch
    colour = strategy_colour(watch.shown_strategy if watch else None, watch.dtype if watch else None)
    series = msgspec.structs.replace(
        evidence.series, axis="step", positions=[float(step) for step in evidence.series.steps]
    )
    name = evidence.run.name if evidence.run else ""
    drawn = curves(evidence.metric, [NamedCurve(name, colour, series)])
    onset, breach, resumed_at = evidence.onset, evidence.breach, evidence.resumed_at
    marks = [(onset.first_changed, "changed")] if onset else []
    marks += [(breach.first_step, "beyond the threshold")] if breach and breach.first_step != resumed_at else []
    marks += [(resumed_at, "resumed")] if resumed_at is not None else []
    marks += [(evidence.step, "fired")] if evidence.step is not None else []
    graph = dcc.Graph(id="incident-figure", figure=mark_steps(drawn, marks), config=GRAPH_CONFIG)
    title = describe(evidence.metric).title
    return card(title, html.Div(graph, className="figure-place"), save_buttons(title), kind="chart-card")


def _compared(evidence: IncidentEvidence) -> Any:
    if evidence.before is None and evidence.after is None:
        return None
    if evidence.onset or evidence.breach:
        how = "Beside the change."
    elif evidence.resumed_at is not None:
        how = "Beside the resume."
    else:
        how = "Beside the steps in which the alert waits, or all there is."
    return before_after_card(evidence.before, evidence.after, how)


def _layers(evidence: IncidentEvidence) -> Any:
    onset, run = evidence.onset, evidence.run
    if onset is None or run is None:
        return None
    if not onset.layers:
        return card("Layers that changed", html.P("No single layer changed clearly.", className="quiet pad"))
    metric = evidence.metric or ""
    rows = [
        (
            dcc.Link(change.layer, href=run_address(run.run_id, change.layer)),
            value_text(metric, change.before),
            value_text(metric, change.after),
        )
        for change in onset.layers[:_MOST_LAYERS]
    ]
    more = len(onset.layers) - _MOST_LAYERS
    title = f"Layers that changed, {len(onset.layers)} of {len(evidence.types)}"
    shown = table((describe(metric).title, "Before", "After"), rows)
    place = scrollable([shown], "Layers that changed")
    return card(title, place, kind="comparison-table", note=f"and {more} more" if more > 0 else "")


def _causes(evidence: IncidentEvidence) -> Any:
    entry = ALERTS.get(evidence.incident.alert)
    if entry is None:
        return None
    likeliest = sorted(entry.cause_verdicts(evidence), key=lambda pair: _LIKELIEST.index(pair[1].holds))
    items = [_cause(cause, verdict) for cause, verdict in likeliest]
    return card("What else it may be", html.Ul(items, className="causes"))


def _cause(cause: str, verdict: CauseVerdict) -> html.Li:
    sign, kind, words = _VERDICTS[verdict.holds]
    hidden: dict[str, Any] = {"aria-hidden": "true"}
    return html.Li(
        [
            html.Span(sign, className=f"mark mark-{kind}", **hidden),
            html.Div(
                [
                    html.Div(f"{cause[0].upper()}{cause[1:]}."),
                    html.Div([html.Strong(words), f"{verdict.because}."], className="quiet because"),
                ]
            ),
        ],
        className=f"cause cause-{kind}",
    )


def _first_step(evidence: IncidentEvidence) -> Any:
    entry = ALERTS.get(evidence.incident.alert)
    return None if entry is None else card("What to do first", html.P(entry.first_step, className="pad"))


def _timeline(evidence: IncidentEvidence) -> Any:
    run, events = evidence.run, list(evidence.events)[-_MOST_EVENTS:]
    if run is None:
        return None
    rows = [_event(event, evidence.incident) for event in events]
    if run.notes:
        rows.insert(
            0, ("", "", html.Div([html.Strong("Notes of the run"), html.Div(run.notes, className="notes")]))
        )
    older = evidence.older_events + len(evidence.events) - len(events)
    note = [
        dmc.Text(f"{left_out} {which} events are left out", size="xs", className="quiet", px=10)
        for left_out, which in ((older, "older"), (evidence.later_events, "later"))
        if left_out
    ]
    shown = scrollable([table(("When", "Step", "What"), rows, texts=(1, 2))], "Timeline")
    return card("Timeline", shown, *note, kind="comparison-table timeline")


def _event(event: wire.Event, incident: wire.Incident) -> Sequence[Any]:
    own = event.kind in {"alert", "alert_resolved"} and event.text.startswith(f"{incident.alert} ")
    resumed = event.kind == "attempt" and (event.attempt or 1) > 1
    title = "Resumed" if resumed else EVENTS[event.kind]
    # The page's top already shows what the incident says.
    text = event.text.removesuffix(f": {incident.text}") if own else event.text
    text += f" ({', '.join(event.layers)})" if event.layers else ""
    what = [html.Strong(title), html.Div(text, className="quiet")]
    step = UNDEFINED if event.step is None else count(event.step)
    return when(event.time), step, html.Div(what, className="own" if own else "")
