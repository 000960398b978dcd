"""What people put around an optimizer: tied weights, schedule-free steps, steps in the backward pass."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW
from schedulefree import ScheduleFreeWrapper
from torch import nn

from tests.optim.models import assert_same_bits, give_gradients, parameters, tensors_of
from tests.waiting import PATIENCE_SECONDS

WIDTH, LAYERS = 2048, 12
PEAK = rf"""
import re, sys, torch
from pathlib import Path
from collage_optim import CollageAdamW
from tests.optim.test_company import in_backward, stack

def kilobytes(name):  # Of this program alone: `ru_maxrss` begins at what the process before `exec` had.
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])


make = lambda members: CollageAdamW(members, strategy="split-master-8bit", seed=1)
small = stack(1, 8)  # What a first step imports is no part of it.
small(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
make(small.parameters()).step()
model = stack({LAYERS}, {WIDTH})
before = kilobytes("VmRSS")
optimizer = None if sys.argv[1] == "released" else make(model.parameters())
if optimizer is None:
    in_backward(model, make)
for step in range(2):
    model(torch.ones(1, {WIDTH}, dtype=torch.bfloat16)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
print(1024 * (kilobytes("VmHWM") - before))
"""


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


def stack(layers, width):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def in_backward(model, make):
    """As `docs/how-to/our-optimizers.md` shows it: an optimizer for each parameter, which frees its gradient."""
    optimizers = {parameter: make([parameter]) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


@pytest.mark.parametrize("strategy", [name for name, own in STRATEGIES.items() if not own.stochastic])
def test_steps_in_the_backward_pass_have_the_bits_of_a_whole_step(strategy):
    whole, released = stack(3, 8), stack(3, 8)
    optimizer = CollageAdamW(whole.parameters(), strategy=strategy)
    optimizers = in_backward(released, lambda members: CollageAdamW(members, strategy=strategy))
    for step in range(4):
        for model in (whole, released):
            model(torch.full((5, 8), 1.0 + step, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(member.grad is None for member in released.parameters())
    found = [tensors_of(own) for own in optimizers.values()]
    for (_, place, key), tensor in tensors_of(optimizer).items():
        assert torch.equal(found[place][0, 0, key], tensor), key


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read in kilobytes, as Linux tells it")
def test_steps_in_the_backward_pass_hold_one_gradient_at_a_time():
    """The peak of a process above its weights, states included. What is freed goes back to the system at once:
    pages that the allocator kept made the peak another one each time."""
    peaks, given_back = {}, {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for how in ("whole", "released"):
        command = [sys.executable, "-c", PEAK, how]
        done = subprocess.run(
            command, env=given_back, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
        )
        peaks[how] = int(done.stdout)
    all_but_one = 2 * WIDTH**2 * (LAYERS - 1)
    assert (peaks["whole"] - peaks["released"]) / all_but_one == pytest.approx(1, abs=0.1)
