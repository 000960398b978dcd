"""Training spread over processes is bit for bit the same with and without the agent."""

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.training.ddp import stepping_optimizer
from torch import distributed, nn

from tests.agent.training import Block
from tests.parallel.launch import launch
from tests.parallel.measuring import Recorder
from tests.parallel.models import SPREAD

pytestmark = pytest.mark.slow

WAYS = ("ddp", "fsdp2", "fsdp1 original", "fsdp1 flat", "zero")
STEPS = 6


class Attention(nn.Module):
    """Transformer blocks between two projections, with dropout: real gradients, and random numbers drawn."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(16, 24), Block(24), Block(24), nn.Linear(24, 3)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for part in self.parts[:-1]:
            x = self.dropout(part(x))
        return self.parts[-1](x)


def identity(folder):
    """Some steps with and without the agent: losses, weights, states and random states of this rank."""
    seen = {}
    for name in WAYS:
        for watched in (False, True):
            torch.manual_seed(5)
            model, optimizer = SPREAD[name](torch.bfloat16, Attention().to(torch.bfloat16))
            seen[name, watched] = _steps(model, optimizer, watched)
    return seen


def _steps(model, optimizer, watched):
    torch.manual_seed(7 + distributed.get_rank())
    recorder = Recorder()
    if watched:
        watch(model, optimizer, every=1, sample=256, budget=None, oracle=True, reporter=recorder)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 6, 16, dtype=torch.bfloat16)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    stepping = stepping_optimizer(optimizer)
    states = {
        (index, key): own(value)
        for index, parameter in enumerate(model.parameters())
        for key, value in stepping.state.get(parameter, {}).items()
    }
    return {
        "losses": losses,
        "weights": {name: own(parameter) for name, parameter in model.named_parameters()},
        "states": states,
        "random": torch.get_rng_state().tolist(),
        "measured": len(recorder.measurements),
    }


def own(tensor):
    """This rank's part of a tensor, as bytes are compared."""
    tensor = tensor.detach()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.contiguous().view(torch.uint8) if local.dim() else local


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return launch("test_identity.identity", 2, tmp_path_factory.mktemp("identity"))


@pytest.mark.parametrize("name", WAYS)
def test_steps_are_bit_identical_with_and_without_the_agent(name, seen):
    for rank in seen:
        plain, watched = rank[name, False], rank[name, True]
        assert len(plain["losses"]) == STEPS
        assert len(set(plain["losses"])) > STEPS // 2
        assert plain["losses"] == watched["losses"]
        assert plain["random"] == watched["random"]
        for kind in ("weights", "states"):
            assert plain[kind].keys() == watched[kind].keys()
            for key, value in plain[kind].items():
                assert torch.equal(value, watched[kind][key]), (kind, key)
        assert watched["measured"] == STEPS
