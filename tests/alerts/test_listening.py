"""A training hears of its alerts, the command line lists them: from a real server, over HTTP."""

from __future__ import annotations

import json
import logging
import threading

import collage_agent as collage
import pytest
from click.testing import CliRunner
from collage_agent.session import _SESSION
from collage_agent.transport.alert_listener import AlertListener

from collage_monitor.client import Client
from collage_monitor.command.alerts import alerts
from collage_monitor.local import ensure_token, read_token, token_path
from collage_monitor.wire import AlertmanagerAlert, AlertmanagerMessage
from tests.ports import command, free_port, running
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def clean():
    yield
    if _SESSION.run is not None:
        _SESSION.run.finish(seconds=1.0)
    _SESSION.run = None
    _SESSION.alert_callbacks.clear()
    _SESSION.listen()


@pytest.fixture
def client(tmp_path):
    port = free_port()
    ensure_token(tmp_path)
    server = command("serve", "--dir", tmp_path, "--port", port, "--token-file", token_path(tmp_path))
    address = f"http://127.0.0.1:{port}"
    with (
        running(server, f"{address}/healthz", tmp_path / "server.log"),
        Client(address, read_token(tmp_path)) as own,
    ):
        yield own


def fire(client, run_id, name="CollageNotFinite"):
    """As Alertmanager does: the quickest way to make a server say that something fires."""
    labels = {"alertname": name, "run_id": run_id, "severity": "critical"}
    sent = AlertmanagerAlert(status="firing", labels=labels, annotations={"summary": "weights are NaN"})
    client.post("/alerts/alertmanager", AlertmanagerMessage(alerts=[sent]), object)


def test_a_training_hears_of_each_alert_once_and_survives_its_callback(client, tmp_path, caplog):
    heard, done = [], threading.Event()

    def stop(incident):
        heard.append((incident.alert, incident.severity, incident.text))
        done.set()

    def broken(incident):
        raise RuntimeError("the callback's own fault")

    caplog.set_level(logging.ERROR, logger="collage_agent")
    collage.on_alert(broken, every_seconds=0.02)
    collage.on_alert(stop, every_seconds=0.02)
    with collage.init("p", "r", server_url=client.server_url, token=read_token(tmp_path), dir=tmp_path) as run:
        collage.log({"loss": 1.0}, step=1)
        until(lambda: [one for one in client.runs().runs if one.run_id == run.run_id], "the run is there")
        fire(client, run.run_id)
        assert done.wait(PATIENCE_SECONDS)
        done.clear()
        fire(client, run.run_id, "CollageLossNotFinite")
        assert done.wait(PATIENCE_SECONDS)
    assert [name for name, _, _ in heard] == ["CollageNotFinite", "CollageLossNotFinite"]
    assert heard[0][1:] == ("critical", "weights are NaN")
    assert "the callback for alerts failed on CollageNotFinite" in caplog.text

    listed = CliRunner().invoke(alerts, ["--server-url", client.server_url, "--token", str(read_token(tmp_path))])
    assert "CollageNotFinite: firing, critical, since" in listed.output, listed.output
    assert f"run {run.run_id} of p" in listed.output
    own = ["--server-url", client.server_url, "--token", str(read_token(tmp_path))]
    led = CliRunner().invoke(alerts, [*own, "--dashboard-url", "http://box.lan"])
    assert led.output.count("  http://box.lan/incident/") == 2
    options = ["--run", run.run_id, "--silence-hours", "1", "--json"]
    without_scope = CliRunner().invoke(alerts, [*own, "--silence-hours", "1"])
    assert (without_scope.exit_code, "name what is to be silent" in without_scope.output) == (2, True)
    told = CliRunner().invoke(alerts, [*own, *options])
    assert told.stderr.startswith("silenced until 20")
    assert told.stderr.endswith(f"UTC: run {run.run_id}\n")
    silenced = json.loads(told.stdout)["events"]
    assert [entry["silenced"] for entry in silenced] == [True, True]
    taken = CliRunner().invoke(alerts, [*own, "--acknowledge", silenced[0]["incident_id"]])
    assert "acknowledged by server-token, silenced" in taken.output
    nothing = CliRunner().invoke(alerts, [*own, "--project", "other"])
    assert nothing.output.startswith("no alerts")


def test_a_server_that_is_away_is_asked_again_without_a_word(caplog):
    listener = AlertListener(
        f"http://127.0.0.1:{free_port()}", lambda: None, "r", [print], every_seconds=0.01, over=lambda: False
    )
    listener.ask()
    assert caplog.text == ""


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="callback='stop'"):
        collage.on_alert("stop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_seconds=0"):
        collage.on_alert(print, every_seconds=0)


def test_a_run_that_is_not_sent_is_not_asked_about(tmp_path):
    collage.on_alert(print)
    with collage.init("p", dir=tmp_path, mode="offline"):
        assert _SESSION.listener is None
