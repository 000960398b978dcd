"""Training with the agent is bit for bit training without it: weights, states, losses, random states."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collage_agent.handle import watch
from collage_optim import STRATEGIES, CollageAdamW

from tests.agent.training import adamw, gpt_loss, small_gpt, train

pytestmark = pytest.mark.slow

STEPS = 12
OPTIMIZERS = {
    "AdamW for-loop": partial(adamw, weight_decay=0.1, foreach=False),
    "AdamW foreach": partial(adamw, weight_decay=0.1, foreach=True),
    "AdamW fused": partial(adamw, weight_decay=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "CollageAdamW light, storage": partial(CollageAdamW, lr=1e-3, strategy="light", arithmetic="storage"),
    "CollageAdamW compiled": partial(CollageAdamW, lr=1e-3, compiled=True),
    **{f"CollageAdamW {strategy}": partial(CollageAdamW, lr=1e-3, strategy=strategy) for strategy in STRATEGIES},
}


COMPILED = ("CollageAdamW compiled",)
"""Its bits are the eager step's, by day, too (tests/optim/test_compiled.py)."""
AT_NIGHT = pytest.mark.nightly


def run(make, watched: bool, scheduled: bool = False, **options):
    random.seed(1)
    np.random.seed(1)
    model = small_gpt(layers=1)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if scheduled else None
    handle = watch(model, optimizer, budget=None, **options) if watched else None
    losses = train(model, optimizer, STEPS, gpt_loss, scheduler=scheduler)
    if handle is not None:
        assert handle.summary()["model"]["edq_ratio"] is not None
    weights = [p.detach().clone() for p in model.parameters()]
    states = [dict(optimizer.state[p]) for p in model.parameters()]
    numpy_state: Any = np.random.get_state()
    return losses, weights, states, (torch.get_rng_state(), random.getstate(), numpy_state[1].tolist())


def assert_same(one, other):
    assert one[0] == other[0]
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert torch.equal(bits(mine), bits(theirs))
    for mine, theirs in zip(one[2], other[2], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(bits(value), bits(theirs[key])), key
            else:
                assert value == theirs[key]
    assert torch.equal(one[3][0], other[3][0])
    assert one[3][1:] == other[3][1:]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def parts(name):
    """What of an optimizer the agent can meet: whose it is, or how each number of a strategy is kept."""
    strategy = STRATEGIES.get(name.removeprefix("CollageAdamW "))
    if strategy is None:
        return ["ours" if "Collage" in name else "torch's"]
    return ["a strategy", *strategy.storages, strategy.stochastic]


@pytest.mark.drawn(by=parts)
@pytest.mark.parametrize("name", [pytest.param(n, marks=AT_NIGHT) if n in COMPILED else n for n in OPTIMIZERS])
def test_steps_are_bit_identical_with_and_without_the_agent(name):
    make = OPTIMIZERS[name]
    assert_same(run(make, watched=False), run(make, watched=True, every=1, sample=512, oracle=True, windows=(3,)))


def test_a_schedule_is_left_alone_too():
    make = OPTIMIZERS["AdamW foreach"]
    assert_same(run(make, False, scheduled=True), run(make, True, scheduled=True, every=3, sample=512, oracle=True))
