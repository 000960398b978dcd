"""Incidents: their list tells what was asked for, and the page of one says what its evidence shows."""

import time

import msgspec
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.incident_evidence import read_incident_evidence
from collage_dashboard.pages.incident_content import badges, body, duration_of, head
from collage_dashboard.pages.incidents import _content, _questions
from collage_dashboard.view import View, write_address
from flask import Flask

from collage_monitor import wire
from collage_monitor.diagnosis.causes import Breach, IncidentEvidence, Span
from collage_monitor.onset import LayerChange, Onset
from tests.alerts.test_causes import RUN
from tests.dashboard.walk import attributes, by_id, text

KIND: dict = {"alert": "CollageEdqLow", "severity": "warning", "source": "server", "state": "firing"}
INCIDENT = wire.Incident(incident_id="1", started_at=1000.0, run_id="r1", step=900, text="EDQ is low", **KIND)
ONSET = Onset(last_before=448, first_changed=450, settled=452, before=1.0, after=0.25)
PASSED = Breach(600, 640, 0.99, 0.3, False, False)
LASTING = Breach(600, 900, 0.99, 0.3, True, False)
FROM_THE_FIRST = Breach(1, 900, None, 0.3, True, True)
AT_ONE_STEP = Breach(600, 600, 0.99, 0.3, False, False)
FROM_NOTHING = Breach(600, 640, None, 0.3, False, False)
DROPPED = Breach(170, 170, 0.0, 0.977, False, False)
OF_THE_SERVER = msgspec.structs.replace(INCIDENT, run_id=None)
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
        (evidence(run=None, incident=OF_THE_SERVER), "This alert is about the server, not about a run."),
        (evidence(run=None), "The run is gone, and with it what it reported."),
        (evidence(None), "No curve shows what this alert watches."),
        (evidence(None, resumed_at=170), "No curve shows what this alert watches. The run resumed at step 170."),
        (evidence(onset=ONSET), "between steps 448 and 450 (settled at step 452): 1.000 before, 0.250 after."),
        (evidence(onset=ONSET, resumed_at=450), "At the resume at step 450: EDQ changed between steps 448"),
        (evidence(), "The step at which EDQ changed was not found."),
        (evidence(resumed_at=1170), "EDQ changed was not found. The run resumed at step 1,170."),
        (evidence(breach=LASTING), "EDQ is beyond the alert's threshold since step 600."),
        (evidence(breach=FROM_THE_FIRST), "threshold since step 1, the first that was measured."),
        (evidence(breach=PASSED), "EDQ was beyond the alert's threshold from step 600 to 640."),
        (evidence(breach=AT_ONE_STEP), "EDQ was beyond the alert's threshold at step 600."),
        (evidence(breach=PASSED, resumed_at=600), "At the resume at step 600, EDQ went from 0.990 to 0.300."),
        (evidence(breach=FROM_NOTHING, resumed_at=600), "At the resume at step 600, EDQ went to 0.300."),
        (
            evidence("residual_dropped_ratio", breach=DROPPED, resumed_at=170),
            "97.7 % of the residuals were dropped.",
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
    assert ("Beside" in said(found)) is bool(found.after), "nothing is compared where nothing was reported"


def test_the_layers_that_changed_lead_to_their_pages_and_the_rest_is_counted():
    changes = tuple(LayerChange(f"layer {place}", 1.0, 0.25) for place in range(23))
    onset = Onset(448, 450, 452, 1.0, 0.25, changes)
    found = evidence(onset=onset, types={f"l{place}": None for place in range(40)})
    with Flask("pages").test_request_context():
        page = body(found)
    assert "Layers that changed, 23 of 40" in text(page)
    assert "and 3 more" in text(page)
    ways = [way for way in attributes(page, "href") if way.startswith("/run/r1")]
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


ENDED = {"state": "resolved", "resolved_at": 2000.0, "source": "alertmanager", "step": None}
SILENCED = {"acknowledged_by": "me", "acknowledged_at": 1500.0, "silenced": True}


@pytest.mark.parametrize(
    ("more", "said_beside", "said_below"),
    [
        ({}, "open warning", "and is open. Found by this server's evaluation."),
        (ENDED, "ended warning", "Found by Alertmanager."),
        (SILENCED, "open warning acknowledged by me silenced", "at step 900, and is open."),
        ({"alert": "Unknown", "severity": "other"}, "open other", "Unknown fired"),
    ],
)
def test_the_head_says_state_source_and_who_takes_care(more, said_beside, said_below):
    incident = msgspec.structs.replace(INCIDENT, **more)
    assert text(badges(incident)) == said_beside
    with Flask("pages").test_request_context():
        top = head(incident)
    assert said_below in text(top)
    button = by_id(top, "incident-acknowledge")
    assert button.children == ("Undo acknowledgement" if "acknowledged_by" in more else "Acknowledge")


@pytest.mark.parametrize(
    ("state", "shown", "said"),
    [
        (None, [1], "1 incident open. 1 fired in the last 12 hours."),
        (None, [1, 2], "1 incident open. 2 fired in the last 12 hours."),
        ("firing", [1], "1 incident open. 1 fired in the last 12 hours."),
        ("resolved", [2], "1 fired in the last 12 hours."),
    ],
)
def test_the_list_tells_only_what_was_asked_for(server, state, shown, said):
    now = time.time()
    both = {
        1: msgspec.structs.replace(OF_THE_SERVER, started_at=now - 60, acknowledged_by="me"),
        2: msgspec.structs.replace(OF_THE_SERVER, started_at=now - 120, state="resolved", resolved_at=now - 60),
    }
    page = wire.IncidentPage(events=[both[number] for number in shown])
    with create_dashboard(server.client).server.test_request_context():
        assert text(_content([page], {}, View(state=state))).startswith(said)


def test_a_state_that_is_none_filters_nothing():
    """Nothing was asked then, which no page survived."""
    assert len(_questions(View(state="running"))) == len(_questions(View())) == 2
    assert len(_questions(View(state="firing"))) == 1


def notes(count):
    """What happened to a run: a note a second."""
    return [
        wire.Event(event=i, time=float(i), kind="note", text=f"u: note {i}", step=i) for i in range(1, count + 1)
    ]


def test_of_many_events_the_newest_are_marked(server, shown):
    server.events = notes(1500)
    content = text(shown("/run/run-plain"))
    assert "note by u: note 1500 at step 1,500" in content
    assert "note by u: note 1000 " not in content
    assert sum("/events?" in url for url in server.asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alert_at", "first", "last", "left_out"),
    [
        (1800, 1701, 1900, {"older": "1700", "later": "100"}),
        (2000, 1801, 2000, {"older": "1800"}),
        (20, 1, 120, {"later": "1880"}),
    ],
)
def test_an_incident_shows_what_happened_around_its_alert(server, alert_at, first, last, left_out):
    server.events = notes(2000)
    incident = msgspec.structs.replace(INCIDENT, started_at=float(alert_at), run_id="run-plain", step=100)
    content = text(body(read_incident_evidence(server.client(), incident))) + " "
    shown = [number for number in (first - 1, first, last, last + 1) if f"u: note {number} " in content]
    assert shown == [first, last]
    for words in ("older", "later"):
        assert (f"{words} events are left out" in content) is (words in left_out)
        assert words not in left_out or f"{left_out[words]} {words} events are left out" in content
    assert sum("/events?" in url for url in server.asked) == 2
