"""The list of incidents by the reader's own days."""

import re
import time

import msgspec
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.pages.incidents import _content, _questions
from collage_dashboard.view import View

from collage_monitor import wire
from tests.dashboard.walk import text

MIDNIGHT = 1_795_651_200.0
"""Thursday, 26 November 2026, 00:00 UTC."""


def ended(number, started_at, **more):
    return wire.Incident(
        incident_id=str(number),
        alert="CollageEdqLow",
        severity="warning",
        source="server",
        state="resolved",
        text="EDQ is low",
        started_at=started_at,
        resolved_at=started_at + 60,
        labels={},
        **more,
    )


@pytest.mark.parametrize(
    ("zone", "days"),
    [
        ("Asia/Tokyo", ["Thursday, 26 November 2026 · 2", "Wednesday, 25 November 2026 · 1"]),
        ("America/New_York", ["Wednesday, 25 November 2026 · 2", "Tuesday, 24 November 2026 · 1"]),
        (None, ["Thursday, 26 November 2026 (UTC) · 1", "Wednesday, 25 November 2026 (UTC) · 2"]),
        ("no/such", ["Thursday, 26 November 2026 (UTC) · 1", "Wednesday, 25 November 2026 (UTC) · 2"]),
        ("../../etc/passwd", ["Thursday, 26 November 2026 (UTC) · 1", "Wednesday, 25 November 2026 (UTC) · 2"]),
    ],
)
def test_incidents_stand_under_the_day_on_which_their_reader_saw_them(server, zone, days):
    app = create_dashboard(server.client)
    hours = (1, -2, -20)
    found = wire.IncidentPage(events=[ended(place, MIDNIGHT + 3600 * hour) for place, hour in enumerate(hours)])
    with app.server.test_request_context(headers={"Cookie": f"zone={zone}"} if zone else {}):
        said = text(_content([found], {}, View()))
    assert re.findall(r"\w+day, \d+ November 2026[^·]*· \d+", said) == days


@pytest.mark.parametrize(
    ("state", "shown", "said"),
    [
        (None, [1], "1 incident open. 1 fired in the last 12 hours, none of them has ended."),
        (None, [1, 2], "1 incident open. 2 fired in the last 12 hours, 1 of them has ended."),
        ("firing", [1], "1 incident open. 1 fired in the last 12 hours. "),
        ("resolved", [2], "1 fired in the last 12 hours and has ended."),
    ],
)
def test_only_what_was_asked_for_is_told(server, state, shown, said):
    now = time.time()
    firing = msgspec.structs.replace(ended(1, now - 60), state="firing", resolved_at=None, acknowledged_by="me")
    both = {1: firing, 2: ended(2, now - 120)}
    page = wire.IncidentPage(events=[both[number] for number in shown])
    with create_dashboard(server.client).server.test_request_context():
        assert text(_content([page], {}, View(state=state))).startswith(said)


def test_a_state_that_is_none_filters_nothing():
    """Nothing was asked then, which no page survived."""
    assert len(_questions(View(state="running"))) == len(_questions(View())) == 2
    assert len(_questions(View(state="firing"))) == 1
