"""The training's random numbers come out the same while the agent cannot reach its server."""

import random

import collage_agent as collage
import pytest
import torch

from tests.agent.training import mlp, train
from tests.forking import TORCH, run_forked
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow


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


def test_importing_the_agent_and_using_it_for_the_first_time_draws_nothing():
    program = (
        "import random, numpy, torch; random.seed(7); numpy.random.seed(7); torch.manual_seed(7)\n"
        "def numbers():\n"
        "    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()\n"
        "before = numbers(); import collage_agent; assert numbers() == before\n"
        "assert [getattr(collage_agent, name) for name in collage_agent.__all__]; assert numbers() == before"
    )
    done = run_forked(TORCH, "-c", program)
    assert done.returncode == 0, done.stderr
