"""The same numbers give the same words: in the training process, from the server, and in the terminal."""

from __future__ import annotations

import collage_agent as collage
import httpx
import pytest
import torch
from click.testing import CliRunner
from collage_agent import init
from collage_agent.session import _SESSION
from collage_optim import CollageAdamW
from collage_server.app import create_app
from collage_server.settings import Settings
from starlette.testclient import TestClient
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from collage_monitor.client import Client
from collage_monitor.command import root, server
from collage_monitor.diagnosis import finite
from tests.agent.training import mlp, mlp_loss, train
from tests.agent_delivery.test_attempts import Application
from tests.waiting import PATIENCE_SECONDS, until


@pytest.fixture
def served(tmp_path):
    """A server of this process, and a client that reads from it."""
    with TestClient(create_app(Settings(folder=tmp_path, no_auth=True)), base_url="http://127.0.0.1") as inside:

        def forward(request: httpx.Request) -> httpx.Response:
            path = request.url.raw_path.decode()
            answer = inside.request(request.method, path, headers={"Host": "127.0.0.1"})
            return httpx.Response(answer.status_code, content=answer.content)

        yield Application(inside), Client("http://127.0.0.1", None, transport=httpx.MockTransport(forward))
    if _SESSION.run is not None:
        _SESSION.run.finish(seconds=1.0)
    _SESSION.run = None
    _SESSION.waiting.clear()
    _SESSION.averages.unwrap()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def two_ways(model):
    """Half of the layers round at random, the others to nearest."""
    at_random = {"params": model[0].parameters(), "strategy": "split-master", "lr": 1e-3}
    to_nearest = {"params": model[2].parameters(), "strategy": "plain", "lr": 1e-5}
    return CollageAdamW([at_random, to_nearest], betas=(0.9, 0.95))


@pytest.mark.slow
@pytest.mark.parametrize("make", [adamw, two_ways])
def test_terminal_notebook_and_server_say_the_same(served, monkeypatch, make):
    application, client = served
    run = init("p", "same words", transport=application)
    model = mlp()
    optimizer = make(model)
    handle = collage.watch(model, optimizer, every=1, sample=512, oracle=True, budget=None)
    train(model, optimizer, 30)
    here, evidence = handle.judgement(), handle.evidence()
    assert here.health == "losing updates", here.text
    run.finish(seconds=PATIENCE_SECONDS)

    there = client.overview(run.run_id, fresh=True)
    assert (here.health, here.text) == (there.health, there.text)
    assert [finding.key for finding in here.findings] == [finding.key for finding in there.findings]
    assert here.deciding is not None
    assert here.deciding.value == pytest.approx(there.deciding.value if there.deciding else None, rel=1e-9)
    assert (here.short, here.headline, here.findings[0].since) == (there.short, there.headline, there.since)
    assert there.numbers.keys() >= {"edq_ratio", "update_error_ratio", "residual_zero_ratio"} & set(evidence.model)
    # The server keeps more than the training, which keeps what a judgement reads.
    for key, value in ((key, value) for key, value in there.numbers.items() if key in evidence.model):
        known = finite(evidence.model.get(key))
        assert finite(value) == (None if known is None else pytest.approx(known, rel=1e-9)), key

    monkeypatch.setattr(server, "Client", lambda url, token: client)
    shown = CliRunner().invoke(root, ["show", run.run_id, "--all", "--server-url", "http://127.0.0.1"])
    assert shown.exit_code == 0, shown.output
    assert here.headline in shown.output
    assert here.text in str(handle)
    assert here.text in handle._repr_html_().replace("&gt;", ">")


def test_an_average_that_stands_still_is_told_everywhere_of_a_run_whose_weights_are_healthy(served):
    application, client = served
    run = init("p", "average", transport=application)
    model = mlp(dtype=torch.float32)
    optimizer = adamw(model)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9999)).bfloat16()
    handle = collage.watch(model, optimizer, every=1, sample="all", oracle=True)
    for step in range(40):
        train(model, optimizer, 1, start=step)
        average.update_parameters(model)
    here, summary = handle.judgement(), handle.summary()
    assert here.health == "average is off", here.text
    assert summary["model"]["edq_ratio"] == pytest.approx(1.0, abs=0.01)
    run.finish(seconds=PATIENCE_SECONDS)

    there = client.overview(run.run_id, fresh=True)
    assert (here.health, here.text, here.advised) == (there.health, there.text, there.advised)
    latest = client.latest(run.run_id).model
    series = client.series(run.run_id, "average_moved_ratio", layer="0.weight", points=100)
    (found,) = handle.averages
    assert found.reported
    for key in ("edq", "lost", "moved", "displacement", "drift"):
        name = f"average_{key}_ratio"
        assert finite(latest[name]) == pytest.approx(summary["model"][name], rel=1e-9)
    assert series.values[-1] == summary["layers"]["0.weight"]["average_moved_ratio"]


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_run_whose_steps_are_all_skipped_is_told_everywhere_while_it_goes_on(served, fused, logs):
    """The server had no word, no gauge and no finding of it, and a fused optimizer's layers "had no gradient"."""
    application, client = served
    run = init("p", "skipped", transport=application)
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    handle = collage.watch(model, optimizer, every=1, budget=None)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(65):
        scaler.scale(mlp_loss(model, step) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if logs:
            collage.log({"tokens": step})
    here = handle.judgement()
    assert (here.health, here.findings[0].alert) == ("not finite", "CollageNotFinite")
    until(lambda: "skipped_steps" in client.latest(run.run_id).scalars, "the report of skipped steps")
    until(lambda: client.latest(run.run_id).scalars["skipped_steps"].value == 65.0, "the report of the last")
    there = client.overview(run.run_id, fresh=True)
    assert (here.health, here.headline, here.advised) == (there.health, there.headline, there.advised)
    assert [(own.key, own.value, own.alert) for own in there.findings] == [
        ("skipped_steps", 65.0, "CollageNotFinite")
    ]
    run.finish(seconds=PATIENCE_SECONDS)
    events = client.events(run.run_id).events
    assert {event.kind for event in events} == {"attempt", "skipped_steps"}
    assert events[0].step == 1
