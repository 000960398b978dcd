"""`kill -9` of the real server in mid-run: training goes on, nothing acknowledged is lost, nothing doubled."""

import collage_agent as collage
import pytest
import torch
from torch import nn

from collage_monitor.client import Client
from collage_monitor.local import read_token
from tests.waiting import until

pytestmark = pytest.mark.slow


class Training:
    """A small training that logs its loss at each step, and is measured at each step."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def go_on(self, steps):
        for _ in range(steps):
            loss = self.model(torch.randn(16, 8, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            collage.log({"loss": loss})


def stored_steps(client, run_id):
    return client.series(run_id, "loss", points=10_000).steps


def test_killing_the_server_loses_nothing_and_doubles_nothing(server, tmp_path):
    run = collage.init("kill", "run", server_url=server.url, dir=server.folder)
    training = Training()
    collage.watch(training.model, training.optimizer, every=1, budget=None)
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
        with Client(server.url, read_token(server.folder)) as client:
            assert client.streams(run.run_id).streams[0].reports >= acknowledged
        until(lambda: run.reports_spooled == 0, "an empty spool")
    training.go_on(20)
    collage.finish()

    assert (run.reports_spooled, run.reports_dropped) == (0, {})
    with Client(server.url, read_token(server.folder)) as client:
        (stream,) = client.streams(run.run_id).streams
        assert stream.reports == run.reports_sent
        assert stream.last_seq == stream.reports - 1
        assert client.run(run.run_id).state == "finished"
        assert stored_steps(client, run.run_id) == list(range(1, training.step + 1))
        merged = client.compare([run.run_id], "edq_ratio").runs[0].merged
        assert merged["sampled"] == training.step * sum(p.numel() for p in training.model.parameters())
    assert list(server.folder.glob("spool/*/*")) == []
