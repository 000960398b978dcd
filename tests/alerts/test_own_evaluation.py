"""A real training goes wrong, and the server's own evaluation tells a webhook: three processes, no Prometheus."""

from __future__ import annotations

import collage_agent as collage
import pytest
import torch

from collage_monitor.client import Client
from collage_monitor.local import ensure_token, read_token, token_path
from tests.alerts.receivers import web_server
from tests.ports import command, free_port, running
from tests.waiting import until

pytestmark = pytest.mark.slow


def test_weights_that_are_nan_reach_the_webhook(tmp_path, monkeypatch):
    ensure_token(tmp_path)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = command("serve", "--dir", tmp_path, "--port", port, "--token-file", token_path(tmp_path))
    with web_server() as (hook, requests):
        monkeypatch.setenv("COLLAGE_SERVER_ALERT_WEBHOOK", f"{hook}/alerts")
        monkeypatch.setenv("COLLAGE_SERVER_ALERT_INTERVAL_SECONDS", "0.2")
        with running(server, f"{address}/healthz", tmp_path / "server.log"):
            run_id = trained(address, tmp_path, lambda: requests)
            with Client(address, read_token(tmp_path)) as client:
                (incident,) = client.incidents(run_id=run_id, state="firing").events
                events = client.events(run_id).events
    path, _, body = requests[0]
    assert path == "/alerts"
    assert body["incident"]["alert"] == incident.alert == "CollageNotFinite"
    assert body["incident"]["run_id"] == run_id
    assert body["first_step"].startswith("Stop the run.")
    assert "Judged not finite" in incident.text
    assert (incident.source, incident.severity) == ("server", "critical")
    assert [event.kind for event in events] == ["attempt", "alert"]


def trained(address, folder, told):
    """The run_id of a training whose weights become NaN, and which goes on until `told()`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with collage.init("alerts", "broken", server_url=address, token=read_token(folder), dir=folder) as run:
        collage.watch(model, optimizer, strategy="plain", every=2, budget=None)
        steps(model, optimizer, 20)
        assert not told()
        with torch.no_grad():
            model.bias[3] = float("nan")
        until(lambda: steps(model, optimizer, 2) or told(), "the webhook is told")
    return run.run_id


def steps(model, optimizer, count):
    for _ in range(count):
        model(torch.randn(8, 16).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
