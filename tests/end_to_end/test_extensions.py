"""Statistics and alerts of other packages go the whole way; without the package a server says what it lacks."""

import pytest

from collage_monitor.local import read_token
from tests.extensions import run_with

pytestmark = pytest.mark.slow

ALERTS = """
from collage_monitor.alerts import ALERTS
from collage_server.alert_documents import rules, runbook

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


WITHOUT = """
import collage_agent as collage
from tests.end_to_end.with_statistic import train

run = collage.init("extension", run_id="without", server_url="{url}", token="{token}", dir="{folder}")
train()
collage.finish()
assert run.reports_dropped == dict() and run.reports_spooled == 0, (run.reports_dropped, run.reports_spooled)
"""


def test_a_server_without_the_package_leaves_the_statistic_out_and_says_so(server, client, tmp_path):
    token = read_token(server.folder)
    script = WITHOUT.format(url=server.url, token=token, folder=tmp_path / "agent")
    done = run_with(["extension_statistic"], script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("does not know these statistics") == 1
    assert client.series("without", "edq_ratio").steps == [1, 4, 8, 12]
    (stream,) = client.streams("without").streams
    assert stream.unknown_statistics == ["sign_compared", "sign_agreement"]
    assert "lost" in stream.statistics
    told = [event.text for event in client.events("without").events if event.kind == "unknown_statistics"]
    assert told == ["2 statistics unknown to this server left out: sign_compared, sign_agreement"]
