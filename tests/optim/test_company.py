"""What people put around an optimizer: tied weights, schedule-free steps."""

import copy

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW
from schedulefree import ScheduleFreeWrapper
from torch import nn

from tests.optim.models import assert_same_bits, give_gradients, parameters


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tied_weight_is_stepped_once_and_resumes(strategy):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, step):
            return self.head(self.embedding(torch.arange(11))).float().roll(step, 0).square().mean()

    torch.manual_seed(0)
    model = Tied().bfloat16()
    optimizer = CollageAdamW(model.parameters(), lr=1e-2, strategy=strategy)

    def train(model, optimizer, first):
        for step in range(first, first + 3):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()

    train(model, optimizer, 0)
    assert len(optimizer.state) == 1
    assert optimizer.state[model.head.weight]["step"] == 3
    other = Tied().bfloat16()
    other.load_state_dict(model.state_dict())
    resumed = CollageAdamW(other.parameters(), strategy=strategy)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, its in ((optimizer, model), (resumed, other)):
        train(its, own, 3)
    assert_same_bits(optimizer, resumed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_free_wrapper_keeps_residuals_and_resumes(strategy):
    """It swaps its own weight in for each step, with the bits that the last one left: nothing counts as a write."""
    members, others, alone = parameters(), parameters(), parameters()
    wrapped = ScheduleFreeWrapper(CollageAdamW(members, lr=1e-2, strategy=strategy, seed=3))
    reference = CollageAdamW(alone, lr=1e-2, strategy=strategy, seed=3)
    wrapped.train()
    for step in range(6):
        give_gradients(members, alone, step=step)
        wrapped.step()
        reference.step()
    assert wrapped.base.external_writes == 0
    for member, its in zip(members, alone, strict=True):
        # z, where the inner optimizer steps, is what it is without the wrapper.
        assert torch.equal(wrapped.state[member]["z"], its)
        state = dict(wrapped.state[member])
        del state["z"]
        assert all(torch.equal(state[key], value) for key, value in reference.state[its].items())
    saved = copy.deepcopy(([member.detach() for member in members], wrapped.state_dict()))
    with torch.no_grad():
        for other, value in zip(others, saved[0], strict=True):
            other.copy_(value)
    resumed = ScheduleFreeWrapper(CollageAdamW(others, strategy=strategy))
    resumed.load_state_dict(saved[1])
    resumed.train_mode = True
    for step in range(6, 9):
        give_gradients(members, others, step=step)
        wrapped.step()
        resumed.step()
    assert_same_bits(wrapped.base, resumed.base)
