"""GET /runs/RUN/events and Alertmanager's webhook, as Alertmanager sends it."""

import json
from typing import Any

from collage_monitor import wire
from tests.server.conftest import NOW
from tests.server.guarded import guarded_server
from tests.server.samples import report

ALERT: dict[str, Any] = {
    "labels": {"alertname": "CollageEdqLow", "run_id": "r1", "project": "p", "severity": "warning"},
    "annotations": {"summary": "less than nine tenths of the intended descent reaches the weights"},
    "startsAt": "2026-11-21T10:00:00.000Z",
    "endsAt": "0001-01-01T00:00:00Z",
    "generatorURL": "http://prometheus:9090/graph",
    "fingerprint": "c1a2b3c4d5e6f708",
}
WEBHOOK = {
    "version": "4",
    "groupKey": '{}:{alertname="CollageEdqLow"}',
    "truncatedAlerts": 0,
    "receiver": "collage",
    "groupLabels": {"alertname": "CollageEdqLow"},
    "commonLabels": {"alertname": "CollageEdqLow", "severity": "warning"},
    "commonAnnotations": {},
    "externalURL": "http://alertmanager:9093",
}


def notify(server, status="firing", **labels):
    alert = ALERT | {"status": status, "labels": ALERT["labels"] | labels}
    return told(server, WEBHOOK | {"status": status, "alerts": [alert]}, wire.AlertmanagerAnswer)


def told(server, body, kind=None, status=200):
    headers = {"Content-Type": wire.JSON}
    return server.post("/alerts/alertmanager", json.dumps(body).encode(), kind, status, headers=headers)


def test_a_timeline_from_launch_to_alert(server):
    server.filled()
    server.reports([report(9, 60, measured=False, scalars={"skipped_steps": 2.0})])
    server.clock.now = NOW + 60
    assert notify(server) == wire.AlertmanagerAnswer(stored=1, known=0, ignored=0)
    found = server.get("/runs/r1/events?cursor=0&limit=1000", wire.EventPage)
    kinds = [(event.event, event.kind, event.step) for event in found.events]
    assert kinds == [(1, "attempt", 1), (2, "skipped_steps", 60), (3, "alert", None)]
    told_of = f"CollageEdqLow firing (warning): {ALERT['annotations']['summary']}"
    assert (found.events[2].time, found.events[2].text, found.cursor) == (NOW + 60, told_of, 3)


def test_the_newest_and_those_up_to_a_time_come_without_all_that_is_older(server):
    server.filled()
    for minute in range(1, 6):
        server.clock.now = NOW + 60 * minute
        server.attempt(launch_id=f"launch-{minute + 1}", first_step=10 * minute)
    asked = {
        "limit=2": ([1, 2], 4, 2),
        "newest=true&limit=2": ([5, 6], 4, 6),
        "newest=true&cursor=3&limit=2": ([5, 6], 1, 6),
        "newest=true": ([1, 2, 3, 4, 5, 6], 0, 6),
        f"newest=true&until={NOW + 130}&limit=2": ([2, 3], 1, 3),
        f"until={NOW + 130}": ([1, 2, 3], 0, 3),
        f"newest=true&until={NOW - 1}": ([], 0, 0),
    }
    for query, (events, left_out, cursor) in asked.items():
        found = server.get(f"/runs/r1/events?{query}", wire.EventPage)
        assert ([event.event for event in found.events], found.left_out, found.cursor) == (events, left_out, cursor)
    assert server.get("/runs/r1/events?until=nan", status=422).field == "until"


def test_a_token_stores_alerts_of_its_own_projects_only(tmp_path):
    with guarded_server(tmp_path) as opened:
        for project in ("mine", "theirs"):
            opened.fill(project, f"{project}-1")
        secret, _ = opened.token("ingest", ["mine"])
        alerts = [
            wire.AlertmanagerAlert(status="firing", labels={"alertname": "A", "run_id": f"{project}-1"})
            for project in ("mine", "theirs")
        ]
        answer = opened.ask("POST", "/api/v1/alerts/alertmanager", secret, wire.AlertmanagerMessage(alerts=alerts))
        assert answer.json() == {"stored": 1, "known": 0, "ignored": 1}
        kinds = [e["kind"] for e in opened.ask("GET", "/api/v1/runs/theirs-1/events").json()["events"]]
        assert kinds == ["attempt"]


def test_one_setting_says_which_alerts_are_incidents_whoever_evaluates(server):
    """Prometheus has the whole catalogue: a server beside it had 23 alerts, a laptop those on by default."""
    assert "alerts" in told(server, {}, status=400).message
    assert told(server, {"alerts": [{"status": "maybe", "labels": {}}]}, status=422).field == "alerts[0].status"
    server.filled()
    ignored = wire.AlertmanagerAnswer(stored=0, known=0, ignored=1)
    assert notify(server, alertname="CollageResumeLoss") == ignored
    assert notify(server, alertname="OfSomebodyElse").stored == 1
    object.__setattr__(server.state.settings, "alerts", "critical")
    assert notify(server, alertname="CollageResumeLoss").ignored == 0
    object.__setattr__(server.state.settings, "alerts", "default")
    assert notify(server, "resolved", alertname="CollageResumeLoss").ignored == 0, "what was kept can end"
