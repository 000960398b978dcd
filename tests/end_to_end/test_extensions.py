"""Statistics and alerts of other packages go the whole way; without the package a server says what it lacks."""

from __future__ import annotations

import httpx

from collage_monitor.local import read_token
from tests.extensions import run_with

ALERTS = """
from collage_monitor.alerts import ALERTS
from collage_server.alerting import rules, runbook

assert list(ALERTS)[-1] == "StatesStuck"
assert "alert: StatesStuck" in rules()
stuck = 'collage_state_decrement_ratio{state=\\\\"exp_avg_sq\\\\"} < 0.5'
assert stuck + " and on(run_id) collage_step > 1000" in rules()
assert "## StatesStuck" in runbook()
assert ALERTS["StatesStuck"].conditions and "Prometheus alone" not in runbook()
"""


def test_a_statistic_of_another_package_is_measured_stored_and_answered(tmp_path):
    done = run_with(["extension_statistic"], "from tests.end_to_end.with_statistic import run; run()", tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_alert_of_another_package_has_its_rule_and_its_place_in_the_runbook(tmp_path):
    done = run_with(["extension_alert"], ALERTS, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_server_without_the_package_refuses_the_stream_and_names_the_statistic(server):
    with httpx.Client(
        base_url=f"{server.url}/api/v1",
        headers={"Authorization": f"Bearer {read_token(server.folder)}"},
        trust_env=False,
    ) as client:
        client.post("/projects/extension/runs", json={"run_id": "without"}).raise_for_status()
        client.post("/runs/without/attempts", json={"launch_id": "l", "first_step": 1}).raise_for_status()
        stream = {"stream_id": "s", "launch_id": "l", "statistics": ["lost", "sign_agreement"]}
        answer = client.post("/runs/without/streams", json=stream)
        known = client.post("/runs/without/streams", json={**stream, "statistics": ["lost"]})
    assert answer.status_code == 422
    assert known.is_success
    assert "'sign_agreement'" in answer.json()["error"]["message"]
