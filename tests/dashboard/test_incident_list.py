"""The list of incidents by the reader's own days."""

import re

import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.pages.incidents import _content

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
        ("no/such", ["Thursday, 26 November 2026 (UTC) · 1", "Wednesday, 25 November 2026 (UTC) · 2"]),
        ("../../etc/passwd", ["Thursday, 26 November 2026 (UTC) · 1", "Wednesday, 25 November 2026 (UTC) · 2"]),
    ],
)
def test_incidents_stand_under_the_day_on_which_their_reader_saw_them(server, zone, days):
    app = create_dashboard(server.client)
    hours = (1, -2, -20)
    found = wire.IncidentPage(events=[ended(place, MIDNIGHT + 3600 * hour) for place, hour in enumerate(hours)])
    with app.server.test_request_context(headers={"Cookie": f"zone={zone}"}):
        said = text(_content([found], {}))
    assert re.findall(r"\w+day, \d+ November 2026[^·]*· \d+", said) == days
