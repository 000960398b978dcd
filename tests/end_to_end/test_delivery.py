"""The agent and the real server: what is measured is what is stored, and refusals are understood; `kill -9` of the
server in mid-run loses nothing and doubles nothing."""

import time
from dataclasses import replace
from typing import Any

import collage_agent as collage
import numpy as np
import pytest
import torch
from torch import nn

from collage_monitor.client import Client
from collage_monitor.metrics import STATISTICS
from collage_monitor.wire import from_number
from tests.agent_delivery.doubles import QUICK, layout, make_run, measurement
from tests.server.sockets import listening
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow


def begin(server, **arguments):
    return collage.init(**{"project": "delivery", "server_url": server.url, "dir": server.folder} | arguments)


class Training:
    """A small training that logs its loss at each step."""

    def __init__(self, every=5, first_step=None, oracle=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        options = {"every": every, "budget": None, "oracle": oracle, "first_step": first_step}
        self.handle = collage.watch(self.model, self.optimizer, **options)
        self.step = 0

    def go_on(self, steps):
        for _ in range(steps):
            loss = self.model(torch.randn(16, 8, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            collage.log({"loss": loss})


def train(steps, first_step=None):
    training = Training(first_step=first_step)
    training.go_on(steps)
    return training.handle


def test_the_server_tells_what_the_handle_tells(server, client):
    run = begin(server, name="told", tags=["a"], config={"lr": 1e-3}, seed=1)
    handle = train(20)
    collage.finish()
    summary = handle.summary()
    stored = client.run(run.run_id)
    assert (stored.name, stored.project, stored.tags, stored.config) == ("told", "delivery", ["a"], {"lr": 1e-3})
    assert (stored.state, stored.first_step, stored.last_step) == ("finished", 1, 20)
    latest = client.latest(run.run_id)
    assert latest.step == summary["step"] == 20
    told = {key: value for key, value in summary["model"].items() if value is not None}
    shared = {key for key in told if latest.model.get(key) is not None}
    assert {"edq_ratio", "edq_oracle_ratio", "lost_update_ratio", "state_decrement_ratio/exp_avg_sq"} <= shared
    for key in shared:
        assert from_number(latest.model[key]) == pytest.approx(told[key], rel=1e-12), key
    layers = [layer.name for layer in client.layers(run.run_id).layers]
    assert layers == list(summary["layers"])


def test_a_resumed_run_hides_what_the_older_attempt_saw_later(server, client):
    begin(server, run_id="resumed")
    train(20)
    begin(server, run_id="resumed")
    train(5, first_step=11)
    collage.finish()
    assert [attempt.first_step for attempt in client.run("resumed").attempts] == [1, 11]
    assert client.series("resumed", "loss", points=1000).steps == list(range(1, 16))


def test_a_report_of_two_million_numbers_arrives_whole(server, client, tmp_path):
    plain = [key for key, entry in STATISTICS.items() if entry.label is None]
    statistics = sorted(plain, key=lambda key: key not in ("elements", "sampled"))[:30]
    names = [f"layer.{number:06d}" for number in range(70_000)]
    totals = np.random.default_rng(0).integers(1, 2**30, (len(statistics), len(names))).astype(np.float64)
    run = begin(server, run_id="large")
    run.measured(measurement(10, layout(names, statistics), totals))
    run.finish(seconds=PATIENCE_SECONDS)
    collage.finish()
    assert totals.nbytes > 16 * 2**20
    assert run.reports_dropped == {}
    assert run.reports_sent == 2
    merged = client.compare(["large"], "edq_ratio").runs[0].merged
    for key in ("elements", "sampled"):
        assert merged[key] == totals[statistics.index(key)].sum()


@pytest.mark.parametrize(
    ("resume", "exists", "accepted"),
    [
        pytest.param("never", False, True, marks=pytest.mark.nightly),
        ("never", True, False),
        ("must", False, False),
        pytest.param("must", True, True, marks=pytest.mark.nightly),
    ],
)
def test_resume_is_what_was_asked_for(server, client, resume, exists, accepted):
    if exists:
        begin(server, run_id="asked")
        collage.log({"loss": 1.0}, step=1)
        collage.finish()
    run = begin(server, run_id="asked", resume=resume)
    collage.log({"loss": 1.0}, step=1)
    collage.finish()
    assert run.reports_sent == (1 if accepted else 0)
    assert run.reports_dropped == ({} if accepted else {"run_refused": 1})


def test_a_run_of_another_project_is_refused(server):
    begin(server, run_id="owned")
    collage.finish()
    run = begin(server, project="other", run_id="owned")
    collage.log({"loss": 1.0}, step=1)
    collage.finish()
    assert run.reports_dropped == {"run_refused": 1}


def test_a_wrong_token_keeps_reports_until_the_right_one_comes(server, client):
    run = begin(server, run_id="waits", token="wrong")
    collage.log({"loss": 1.0}, step=1)
    collage.finish()
    assert (run.reports_sent, run.reports_spooled) == (0, 1)
    begin(server)
    collage.finish()
    assert client.series("waits", "loss").steps == [1]


def test_a_run_deleted_in_the_middle_ends_its_sending(server, client):
    run = begin(server, run_id="gone")
    train(10)
    until(lambda: run.reports_sent > 0, "an acknowledged report")
    client.delete_run("gone")
    train(10)
    collage.finish()
    assert run.reports_dropped.keys() == {"run_deleted"}


def test_a_project_may_have_a_slash_in_its_name(server, client):
    run = begin(server, project="team/vision")
    train(10)
    collage.finish()
    stored = client.run(run.run_id)
    assert (stored.project, stored.last_step, run.reports_spooled) == ("team/vision", 10, 0)
    assert [entry.run_id for entry in client.runs(project="team/vision").runs] == [run.run_id]


def test_killing_the_server_loses_nothing_and_doubles_nothing(server, client):
    run = begin(server, run_id="killed")
    training = Training(every=1, oracle=False)
    for _ in range(2):
        before = run.reports_sent
        training.go_on(20)
        until(lambda before=before: run.reports_sent > before, "an acknowledged report")
        training.go_on(20)
        server.kill()
        training.go_on(40)
        until(lambda: run.reports_spooled > 0, "a report in the spool")
        acknowledged = run.reports_sent
        server.start()
        assert client.streams("killed").streams[0].reports >= acknowledged
        until(lambda: run.reports_spooled == 0, "an empty spool")
    training.go_on(20)
    collage.finish()

    assert (run.reports_spooled, run.reports_dropped) == (0, {})
    (stream,) = client.streams("killed").streams
    assert stream.reports == run.reports_sent
    assert stream.last_seq == stream.reports - 1
    assert client.run("killed").state == "finished"
    assert client.series("killed", "loss", points=10_000).steps == list(range(1, training.step + 1))
    merged = client.compare(["killed"], "edq_ratio").runs[0].merged
    assert merged["sampled"] == training.step * sum(p.numel() for p in training.model.parameters())
    assert list(server.folder.glob("spool/*/*")) == []


def test_what_finds_no_room_is_spooled_and_stored_once_sealing_goes_on(tmp_path):
    """The journal is bounded: what a server has no room for waits with the agent."""
    patience = ("connect_timeout_seconds", "answer_timeout_seconds", "finish_seconds")
    longer: dict[str, Any] = dict.fromkeys(patience, PATIENCE_SECONDS)
    bounds = {"journal_run_bytes": 40_000, "seal_interval_seconds": 1e6}
    (tmp_path / "data").mkdir()
    with listening(tmp_path / "data", clock=time.time, limits=bounds) as server:
        sealer, url = server.app_state.sealer, f"http://127.0.0.1:{server.port}"
        work, sealer.do_due_work = sealer.do_due_work, lambda: None
        run = make_run(tmp_path / "agent", server_url=url, run_id="r", project="p", limits=replace(QUICK, **longer))
        for step in range(1, 151):
            run.measured(measurement(step))
            if step == 1:
                until(lambda: run.reports_sent == 1, "the first report, so that the rest is no single batch")
        until(lambda: run.reports_spooled > 0, "the first report that found no room")
        assert server.app_state.store.journal.bytes_of("r") <= bounds["journal_run_bytes"]
        sealer.do_due_work = work
        sealer.wake()
        run.finish(seconds=PATIENCE_SECONDS)
        with Client(url, None) as client:
            series = client.series("r", "grad_norm", points=1000)
            [stream] = client.streams("r").streams
    assert series.steps == list(range(1, 151))
    assert (stream.reports, stream.missing, stream.given_up) == (run.reports_sent, 0, 0)
    assert run.reports_dropped == {}
