"""A training hears of its alerts, the command line lists them, a webhook is told: from a real server, over HTTP."""

import json
import logging
import threading
from contextlib import contextmanager

import collage_agent as collage
import pytest
import torch
from click.testing import CliRunner
from collage_agent.session import _SESSION
from collage_agent.transport.alert_listener import AlertListener

from collage_monitor.client import Client
from collage_monitor.command.alerts import alerts
from collage_monitor.local import ensure_token, read_token, token_path
from collage_monitor.wire import AlertmanagerAlert, AlertmanagerMessage
from tests.alerts.receivers import web_server
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


@contextmanager
def served(folder):
    """A client of a real server in the folder."""
    port = free_port()
    ensure_token(folder)
    server = command("serve", "--dir", folder, "--port", port, "--token-file", token_path(folder))
    address = f"http://127.0.0.1:{port}"
    with running(server, f"{address}/healthz", folder / "server.log"), Client(address, read_token(folder)) as own:
        yield own


@pytest.fixture
def client(tmp_path):
    with served(tmp_path) as own:
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

    def listing(*options):
        own = ["--server-url", client.server_url, "--token", str(read_token(tmp_path))]
        return CliRunner().invoke(alerts, [*own, *options])

    listed = listing()
    assert "CollageNotFinite: firing, critical, since" in listed.output, listed.output
    assert f"run {run.run_id} of p" in listed.output
    assert listing("--dashboard-url", "http://box.lan").output.count("  http://box.lan/incident/") == 2
    without_scope = listing("--silence-hours", "1")
    assert (without_scope.exit_code, "name what is to be silent" in without_scope.output) == (2, True)
    told = listing("--run", run.run_id, "--silence-hours", "1", "--json")
    assert told.stderr.startswith("silenced until 20")
    assert told.stderr.endswith(f"UTC: run {run.run_id}\n")
    silenced = json.loads(told.stdout)["events"]
    assert [entry["silenced"] for entry in silenced] == [True, True]
    taken = listing("--acknowledge", silenced[0]["incident_id"])
    assert "acknowledged by server-token, silenced" in taken.output
    assert listing("--project", "other").output.startswith("no alerts")


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


def test_weights_that_are_nan_reach_the_webhook(tmp_path, monkeypatch):
    """A real training goes wrong, three processes, no Prometheus; it goes on until the webhook is told."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monkeypatch.setenv("COLLAGE_SERVER_ALERT_INTERVAL_SECONDS", "0.2")
    with web_server() as (hook, requests):
        monkeypatch.setenv("COLLAGE_SERVER_ALERT_WEBHOOK", f"{hook}/alerts")
        with served(tmp_path) as client:
            given = {"server_url": client.server_url, "token": read_token(tmp_path), "dir": tmp_path}
            with collage.init("alerts", "broken", **given) as run:
                collage.watch(model, optimizer, strategy="plain", every=2, budget=None)
                steps(model, optimizer, 20)
                assert not requests
                with torch.no_grad():
                    model.bias[3] = float("nan")
                until(lambda: steps(model, optimizer, 2) or requests, "the webhook is told")
            (incident,) = client.incidents(run_id=run.run_id, state="firing").events
            events = client.events(run.run_id).events
    path, _, body = requests[0]
    assert path == "/alerts"
    assert body["incident"]["alert"] == incident.alert == "CollageNotFinite"
    assert body["incident"]["run_id"] == run.run_id
    assert body["first_step"].startswith("Stop the run.")
    assert "Judged not finite" in incident.text
    assert (incident.source, incident.severity) == ("server", "critical")
    assert [event.kind for event in events] == ["attempt", "alert"]


def steps(model, optimizer, count):
    for _ in range(count):
        model(torch.randn(8, 16).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
