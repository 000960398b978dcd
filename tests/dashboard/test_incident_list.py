"""The list of incidents: only what was asked for, and how many fired of late."""

import time

import msgspec
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.pages.incidents import _content, _questions
from collage_dashboard.view import View

from collage_monitor import wire
from tests.dashboard.walk import text


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
    ("state", "shown", "said"),
    [
        (None, [1], "1 incident open. 1 fired in the last 12 hours."),
        (None, [1, 2], "1 incident open. 2 fired in the last 12 hours."),
        ("firing", [1], "1 incident open. 1 fired in the last 12 hours."),
        ("resolved", [2], "1 fired in the last 12 hours."),
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
