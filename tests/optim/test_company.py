"""What people put around an optimizer: tied weights, schedule-free steps, steps in the backward pass, adapters."""

import copy

import peft
import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW
from schedulefree import ScheduleFreeWrapper
from torch import nn

from tests.optim.models import (
    assert_same_bits,
    copies_of,
    give_gradients,
    parameters,
    tensors_of,
    train_each,
    trained,
)

KEEPING = [name for name, strategy in STRATEGIES.items() if strategy.parameter_state is not None]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, step):
        return self.head(self.embedding(torch.arange(11))).float().roll(step, 0).square().mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tied_weight_is_stepped_once_and_resumes(strategy):
    torch.manual_seed(0)
    model = Tied().bfloat16()
    optimizer = CollageAdamW(model.parameters(), lr=1e-2, strategy=strategy)

    for step in range(3):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    assert len(optimizer.state) == 1
    assert optimizer.state[model.head.weight]["step"] == 3
    other = Tied().bfloat16()
    other.load_state_dict(model.state_dict())
    resumed = CollageAdamW(other.parameters(), strategy=strategy)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_each((optimizer, resumed), 3)
    assert_same_bits(optimizer, resumed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_free_wrapper_keeps_residuals_and_resumes(strategy):
    """It swaps its own weight in for each step, with the bits that the last one left: nothing counts as a write."""
    members, alone = parameters(), parameters()
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
    others = copies_of(members)
    resumed = ScheduleFreeWrapper(CollageAdamW(others, strategy=strategy))
    resumed.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    resumed.train_mode = True
    for step in range(6, 9):
        give_gradients(members, others, step=step)
        wrapped.step()
        resumed.step()
    assert_same_bits(wrapped.base, resumed.base)


def stack(layers, width):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


@pytest.mark.parametrize("strategy", [name for name, own in STRATEGIES.items() if not own.stochastic])
def test_steps_in_the_backward_pass_have_the_bits_of_a_whole_step_and_hold_one_gradient_at_a_time(strategy):
    """As `docs/how-to/our-optimizers.md` shows it: an optimizer for each parameter, which frees its gradient."""
    whole, released = stack(3, 8), stack(3, 8)
    optimizer = CollageAdamW(whole.parameters(), strategy=strategy)
    optimizers = {member: CollageAdamW([member], strategy=strategy) for member in released.parameters()}
    gradients, held = [], []

    def step_and_free(parameter):
        gradients.append(parameter.grad.untyped_storage()._weak_ref())
        held.append(sum(not torch.UntypedStorage._expired(gradient) for gradient in gradients))
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_and_free)
    for step in range(4):
        for model in (whole, released):
            model(torch.full((5, 8), 1.0 + step, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(member.grad is None for member in optimizers)
    assert held == [1] * 12
    found = [tensors_of(own) for own in optimizers.values()]
    for (_, place, key), tensor in tensors_of(optimizer).items():
        assert torch.equal(found[place][0, 0, key], tensor), key


def adapted(**options):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)).bfloat16()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], **options)
    return peft.get_peft_model(base, config, autocast_adapter_dtype=False)


@pytest.mark.slow
@pytest.mark.drawn(by=lambda strategy: (STRATEGIES[strategy].parameter,))
@pytest.mark.parametrize("strategy", KEEPING)
def test_adapters_keep_what_is_beside_them_through_a_merge(strategy):
    """Merging and unmerging write to the frozen weights alone."""
    model = adapted()
    optimizer = CollageAdamW(model.parameters(), lr=1e-2, strategy=strategy, seed=1)
    losses = trained(model, optimizer, 30)
    assert losses[-1] < 0.97 * losses[0]
    assert set(optimizer.state) == {member for name, member in model.named_parameters() if "lora_" in name}
    stored = {member: optimizer.stored_parameter(member) for member in optimizer.state}
    model.merge_adapter()
    model.unmerge_adapter()
    assert all(torch.equal(optimizer.stored_parameter(member), value) for member, value in stored.items())
    trained(model, optimizer, 1)
    assert optimizer.external_writes == 0


@pytest.mark.drawn(by=lambda strategy: (STRATEGIES[strategy].parameter,))
@pytest.mark.parametrize("strategy", KEEPING)
def test_a_merge_into_trained_weights_survives(strategy):
    """peft adds to `.data`, which leaves no version behind."""
    model = adapted(init_lora_weights=False)
    for member in model.parameters():
        member.requires_grad_()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, strategy=strategy, seed=1)
    trained(model, optimizer, 3)
    bases = [member for name, member in model.named_parameters() if name.endswith("base_layer.weight")]
    before = copies_of(bases)
    model.merge_adapter()
    written = copies_of(bases)
    optimizer.param_groups[0]["lr"] = 0.0
    for member in model.parameters():
        member.grad = torch.ones_like(member)
    optimizer.step()
    assert optimizer.external_writes == len(bases)
    for member, old, value in zip(bases, before, written, strict=True):
        changed = old != value
        assert changed.double().mean() > 0.5
        assert torch.equal(member, value)
        assert torch.equal(optimizer.stored_parameter(member)[changed], value.double()[changed])
