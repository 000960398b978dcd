"""What an incident's page says, from the evidence: one table of evidence and words."""

import msgspec
import pytest
from collage_dashboard.pages.incident_content import badges, body, duration_of, head
from collage_dashboard.view import View, write_address
from flask import Flask

from collage_monitor import wire
from collage_monitor.diagnosis.causes import Breach, IncidentEvidence, Span
from collage_monitor.onset import LayerChange, Onset
from tests.alerts.test_causes import RUN
from tests.dashboard.walk import components, text

INCIDENT = wire.Incident(
    incident_id="1",
    alert="CollageEdqLow",
    severity="warning",
    source="server",
    state="firing",
    text="EDQ is low",
    started_at=1000.0,
    run_id="r1",
    step=900,
)
ONSET = Onset(last_before=448, first_changed=450, settled=452, before=1.0, after=0.25)
PASSED = Breach(600, 640, 0.99, 0.3, False, False)
LASTING = Breach(600, 900, 0.99, 0.3, True, False)
SPAN = Span(400, 600, {"edq_ratio": 0.5})


def evidence(metric="edq_ratio", *, run=RUN, incident=INCIDENT, **more):
    return IncidentEvidence(incident, run, 900, metric, **more)


def said(found):
    """All that the page says below its head."""
    with Flask("pages").test_request_context():
        return text(body(found))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            evidence(run=None, incident=msgspec.structs.replace(INCIDENT, run_id=None)),
            "This alert is about the server, not about a run.",
        ),
        (evidence(run=None), "The run is gone, and with it what it reported."),
        (evidence(None), "No curve shows what this alert watches."),
        (evidence(None, resumed_at=170), "No curve shows what this alert watches. The run resumed at step 170."),
        (
            evidence(onset=ONSET),
            "EDQ changed between steps 448 and 450 (settled at step 452): 1.000 before, 0.250 after.",
        ),
        (evidence(onset=ONSET, resumed_at=450), "At the resume at step 450: EDQ changed between steps 448"),
        (evidence(), "The step at which EDQ changed was not found."),
        (evidence(resumed_at=1170), "EDQ changed was not found. The run resumed at step 1,170."),
        (evidence(breach=LASTING), "EDQ is beyond the alert's threshold since step 600."),
        (
            evidence(breach=Breach(1, 900, None, 0.3, True, True)),
            "EDQ is beyond the alert's threshold since step 1, the first that was measured.",
        ),
        (evidence(breach=PASSED), "EDQ was beyond the alert's threshold from step 600 to 640."),
        (
            evidence(breach=Breach(600, 600, 0.99, 0.3, False, False)),
            "EDQ was beyond the alert's threshold at step 600.",
        ),
        (evidence(breach=PASSED, resumed_at=600), "At the resume at step 600, EDQ went from 0.990 to 0.300."),
        (
            evidence(breach=Breach(600, 640, None, 0.3, False, False), resumed_at=600),
            "At the resume at step 600, EDQ went to 0.300.",
        ),
        (
            evidence("residual_dropped_ratio", breach=Breach(170, 170, 0.0, 0.977, False, False), resumed_at=170),
            "At the resume at step 170, 97.7 % of the residuals were dropped.",
        ),
        (evidence(onset=ONSET, before=SPAN, after=SPAN), "Beside the change."),
        (evidence(breach=PASSED, before=SPAN, after=SPAN), "Beside the change."),
        (evidence(resumed_at=170, before=SPAN, after=SPAN), "Beside the resume."),
        (evidence(after=SPAN), "Beside the steps in which the alert waits, or all there is."),
        (evidence(onset=ONSET), "No single layer changed clearly."),
    ],
)
def test_the_page_says_what_changed_and_where_it_compares(found, words):
    assert words in said(found)


def test_nothing_is_compared_where_nothing_was_reported():
    assert "Beside" not in said(evidence())


def test_the_layers_that_changed_lead_to_their_pages_and_the_rest_is_counted():
    changes = tuple(LayerChange(f"layer {place}", 1.0, 0.25) for place in range(23))
    found = evidence(
        onset=Onset(448, 450, 452, 1.0, 0.25, changes), types={f"l{place}": None for place in range(40)}
    )
    with Flask("pages").test_request_context():
        page = body(found)
    assert "Layers that changed, 23 of 40" in text(page)
    assert "and 3 more" in text(page)
    ways = [part.href for part in components(page) if (getattr(part, "href", None) or "").startswith("/run/r1")]
    wanted = [View(page="run", runs=("r1",), layer=f"layer {place}") for place in range(20)]
    assert ways == ["".join(write_address(view)) for view in wanted]


def test_the_timeline_counts_what_it_leaves_out_and_begins_with_the_notes():
    events = [
        wire.Event(event=place, kind="gap", time=900.0, text=f"number {place}", step=place) for place in range(205)
    ]
    events[-1] = msgspec.structs.replace(events[-1], kind="attempt", attempt=2, text="Attempt 2", layers=["a", "b"])
    noted = msgspec.structs.replace(RUN, notes="my notes")
    words = said(evidence(run=noted, events=events, older_events=7, later_events=3))
    assert "12 older events are left out" in words
    assert "3 later events are left out" in words
    assert "number 4 " not in words
    assert "number 5 " in words
    assert "Resumed Attempt 2 (a, b)" in " ".join(words.split()).replace("  ", " ")
    assert words.index("my notes") < words.index("number 5 ")
    assert "left out" not in said(evidence(events=events[:3]))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "–"), (-5.0, "0 s"), (59.0, "59 s"), (60.0, "1 min"), (5400.0, "1.5 h"), (172_800.0, "2 d")],
)
def test_durations_have_the_unit_that_fits(seconds, words):
    ended = None if seconds is None else INCIDENT.started_at + seconds
    assert duration_of(msgspec.structs.replace(INCIDENT, resolved_at=ended)) == words


@pytest.mark.parametrize(
    ("more", "said_beside", "said_below"),
    [
        ({}, "open warning", "and is open. Found by this server's evaluation."),
        (
            {"state": "resolved", "resolved_at": 2000.0, "source": "alertmanager", "step": None},
            "ended warning",
            "Found by Alertmanager.",
        ),
        (
            {"acknowledged_by": "me", "acknowledged_at": 1500.0, "silenced": True},
            "open warning acknowledged by me silenced",
            "at step 900, and is open.",
        ),
        ({"alert": "Unknown", "severity": "other"}, "open other", "Unknown fired"),
    ],
)
def test_the_head_says_state_source_and_who_takes_care(more, said_beside, said_below):
    incident = msgspec.structs.replace(INCIDENT, **more)
    assert text(badges(incident)) == said_beside
    with Flask("pages").test_request_context():
        top = head(incident)
    assert said_below in text(top)
    button = next(part for part in components(top) if getattr(part, "id", None) == "incident-acknowledge")
    assert button.children == ("Undo acknowledgement" if "acknowledged_by" in more else "Acknowledge")
