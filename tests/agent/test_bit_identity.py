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
from tests.optim.models import assert_same_bits

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

AT_NIGHT = "CollageAdamW compiled"
"""Its bits are the eager step's, by day, too (tests/optim/test_compiled.py)."""


def run(make, **options):
    """The optimizer after a scheduled training, and all that the agent might have changed beside it."""
    random.seed(1)
    np.random.seed(1)
    model = small_gpt(layers=1)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    handle = watch(model, optimizer, budget=None, **options) if options else None
    losses = train(model, optimizer, STEPS, gpt_loss, scheduler=scheduler)
    if handle is not None:
        assert handle.summary()["model"]["edq_ratio"] is not None
    numpy_state: Any = np.random.get_state()
    return optimizer, (losses, torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist())


def parts(name):
    """What of an optimizer the agent can meet: whose it is, or how each number of a strategy is kept."""
    strategy = STRATEGIES.get(name.removeprefix("CollageAdamW "))
    if strategy is None:
        return ["ours" if "Collage" in name else "torch's"]
    return ["a strategy", *strategy.storages, strategy.stochastic]


@pytest.mark.drawn(by=parts)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == AT_NIGHT)) for name in OPTIMIZERS]
)
def test_steps_are_bit_identical_with_and_without_the_agent(name):
    (plain, beside), (own, others) = (
        run(OPTIMIZERS[name], **options)
        for options in ({}, {"every": 1, "sample": 512, "oracle": True, "windows": (3,)})
    )
    assert_same_bits(plain, own)
    assert beside == others
