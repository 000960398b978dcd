"""What people put around an optimizer: adapters, tied weights, steps in the backward pass, schedule-free steps."""

import copy

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW
from schedulefree import ScheduleFreeWrapper
from torch import nn

from tests.optim.models import assert_same_bits, give_gradients, parameters, trained

KEEPING = [name for name, strategy in STRATEGIES.items() if strategy.parameter_state is not None]


class LowRank(nn.Module):
    """A linear layer that is frozen, with an adapter B A beside it, as LoRA adds one."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        dtype = base.weight.dtype
        self.down = nn.Parameter((torch.randn(rank, base.in_features) * 0.1).to(dtype))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.up @ self.down
        self.up.zero_()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_adapter_is_trained_merged_and_trained_on(strategy):
    """The frozen weight costs no state; merging writes to it and to the adapter, which begins anew."""
    torch.manual_seed(0)
    model = LowRank(nn.Linear(16, 16)).bfloat16()
    optimizer = CollageAdamW(model.parameters(), lr=1e-2, strategy=strategy)
    losses = trained(model, optimizer, 60)
    assert losses[-1] < 0.9 * losses[0]
    assert set(optimizer.state) == {model.down, model.up}
    frozen, before = model.base.weight.detach().clone(), losses[-1]
    model.merge()
    assert not torch.equal(model.base.weight, frozen)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    trained(model, optimizer, 1, seed=1)
    assert not optimizer.stored_parameter(model.up).any()
    assert optimizer.external_writes == (strategy in KEEPING)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    assert trained(model, optimizer, 60, seed=1)[-1] < before


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [name for name, reference_value in STRATEGIES.items() if not reference_value.stochastic]
)
def test_steps_in_the_backward_pass_are_the_same_steps(strategy):
    """One optimizer a parameter, stepped as soon as its gradient is there, which is freed at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 16)).bfloat16()
    other = copy.deepcopy(model)
    together = CollageAdamW(other.parameters(), lr=1e-2, strategy=strategy)
    alone = {member: CollageAdamW([member], lr=1e-2, strategy=strategy) for member in model.parameters()}

    def step(member):
        alone[member].step()
        member.grad = None

    for member in model.parameters():
        member.register_post_accumulate_grad_hook(step)

    class InBackward:
        def step(self):
            pass

        zero_grad = step

    assert trained(model, InBackward(), 12) == trained(other, together, 12)
    for member, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(alone[member].stored_parameter(member), together.stored_parameter(its))


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
