"""The training's random numbers come out the same while the agent cannot reach its server."""

import random

import collage_agent as collage
import torch

from tests.agent.training import mlp, train
from tests.forking import TORCH, run_forked
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS


def test_retries_draw_nothing_from_the_trainings_generators(tmp_path):
    run = collage.init(server_url=f"http://127.0.0.1:{free_port()}", token="x", dir=tmp_path)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    collage.watch(model, optimizer, every=1)
    random.seed(5)
    before = random.getstate()
    train(model, optimizer, 20)
    run.finish(seconds=PATIENCE_SECONDS)
    assert random.getstate() == before
    assert run.reports_spooled > 0


def test_importing_the_agent_draws_nothing():
    program = (
        "import random; random.seed(7); before = random.getstate(); import collage_agent; "
        "assert random.getstate() == before"
    )
    done = run_forked(TORCH, "-c", program)
    assert done.returncode == 0, done.stderr
