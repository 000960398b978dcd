"""A row that is large is another at each step, as with rare tokens: no interval is given that does not hold."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.agent.training import watched


def intervals(scale, seed, rows, every, steps, momentum=0.0):
    """(given, of them held): the intervals of `edq_ratio` at the measured steps."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=momentum)
    model, optimizer, handle = watched(sgd, nn.Embedding(rows, 64).bfloat16(), every=every, sample=4096, seed=seed)
    given = held = 0
    for step in range(1, steps + 1):
        gradient = 0.5 * torch.randn(rows, 64, generator=generator)
        gradient[torch.randint(0, rows, (1,), generator=generator)] *= scale
        model.weight.grad = gradient.bfloat16()
        kept = optimizer.state.get(model.weight, {}).get("momentum_buffer")
        buffer = model.weight.grad.double() + (momentum * kept.double() if kept is not None else 0.0)
        before, intended = model.weight.detach().double(), -1e-3 * buffer
        optimizer.step()
        if step % every:
            continue
        truth = float((intended * (model.weight.detach().double() - before)).sum() / intended.square().sum())
        found = handle.summary()["model"]
        if found.get("edq_ratio_low") is not None:
            given += 1
            held += found["edq_ratio_low"] <= truth <= found["edq_ratio_high"]
    return given, held


@pytest.mark.drawn(by=lambda scale, rows, every, momentum: (momentum > 0,))
@pytest.mark.parametrize(("scale", "rows", "every", "momentum"), [
    (300, 2000, 1, 0.0), (300, 2000, 10, 0.0), (100, 3000, 1, 0.0), (1000, 800, 2, 0.0), (300, 2000, 1, 0.9),
])  # fmt: skip
def test_an_outlier_that_moves_is_given_no_interval(scale, rows, every, momentum):
    found = [intervals(scale, seed, rows, every, 24 * min(every, 3), momentum) for seed in range(3)]
    given, held = (sum(column) for column in zip(*found, strict=True))
    assert held == given, f"{held} of {given} hold"


def test_what_an_earlier_look_missed_takes_the_intervals_of_later_steps_away():
    """A look every ten measured steps: one without the large row is followed by steps that may have it."""
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=1e-3)
    model, optimizer, handle = watched(sgd, nn.Embedding(2000, 64).bfloat16(), sample=4096, seed=0)
    generator = torch.Generator().manual_seed(0)
    for step in range(13):
        gradient = 0.5 * torch.randn(2000, 64, generator=generator)
        gradient[7] *= 300 if step == 0 else 1
        model.weight.grad = gradient.bfloat16()
        optimizer.step()
    assert handle.summary()["model"].get("edq_ratio_low") is None


@pytest.mark.parametrize("rows", [pytest.param(2000, marks=pytest.mark.nightly), 140])
def test_without_one_intervals_are_given_and_hold(rows):
    found = [intervals(1, seed, rows, 1, 24) for seed in range(3)]
    given, held = (sum(column) for column in zip(*found, strict=True))
    assert given >= 0.9 * 72
    assert held >= 0.85 * given
