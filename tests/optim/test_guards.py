"""Guards: each names the value and what to use instead, once, and nothing is said of what holds."""

import logging
import math

import pytest
import torch
from collage_agent.optim import CollageAdamW, CollageLion, CollageSGD
from collage_agent.optim.guards import log_once

from tests.optim.models import parameters, train


@pytest.fixture(autouse=True)
def _nothing_said_before():
    log_once.cache_clear()
    yield
    log_once.cache_clear()


def findings(caplog, make, steps=0):
    """What is logged while an optimizer is made, and takes steps."""
    with caplog.at_level(logging.WARNING, logger="collage_agent.optim"):
        optimizer = make()
        if steps:
            train(optimizer, optimizer.param_groups[0]["params"], steps)
    return [record.getMessage() for record in caplog.records]


BEYOND = [
    ("plain", 0.999, "use strategy 'plus', 'light-stochastic' or 'fp32-states'"),
    ("light", 0.999, "use strategy 'plus', 'light-stochastic' or 'fp32-states'"),
    ("kahan", 0.9985, "exp_avg_sq with decay 0.9985 is more than 'kahan' can hold in torch.bfloat16"),
    ("plus", 0.99998, "not at all below 1 - decay = 2**-15; use strategy 'fp32-states' or 'master-weights'"),
]


@pytest.mark.parametrize(("strategy", "beta2", "words"), BEYOND)
def test_decay_beyond_the_strategy(caplog, strategy, beta2, words):
    said = findings(caplog, lambda: CollageAdamW(parameters(), betas=(0.9, beta2), strategy=strategy))
    assert len(said) == 1
    assert words in said[0]


HOLDS = [
    ("plain", 0.99),
    ("light", 0.996),
    ("plus", 0.999),
    ("plus", 0.9999),
    ("full", 0.9999),
    ("light-stochastic", 0.999),
    ("stochastic", 0.9999),
    ("fp32-states", 0.9999),
    ("master-weights", 0.99999),
]


@pytest.mark.parametrize(("strategy", "beta2"), HOLDS)
def test_nothing_is_said_of_what_holds(caplog, strategy, beta2):
    make = lambda: CollageAdamW(parameters(), betas=(0.9, beta2), strategy=strategy)  # noqa: E731
    assert findings(caplog, make, steps=2) == []


@pytest.mark.parametrize(
    ("strategy", "decays", "lowest", "highest"),
    [
        ("light", 1 - 2.0**-7.9, 0.7, 1.5),
        ("light", 1 - 2.0**-8.6, 0.0, 0.3),
        ("plus", 1 - 2.0**-14, 0.95, 1.05),
        ("plus", 1 - 2.0**-20, 0.0, 0.3),
    ],
)
def test_the_limit_is_where_decay_ends(strategy, decays, lowest, highest):
    """An average left without gradient: its decay as a share of the exact one, on both sides of the limit."""
    member = torch.nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
    optimizer = CollageAdamW([member], betas=(0.9, decays), strategy=strategy, lr=0.0)
    member.grad = torch.linspace(1, 2, 128).bfloat16()
    optimizer.step()
    before = optimizer.state[member]["exp_avg_sq"].double()
    member.grad = torch.zeros_like(member)
    steps = min(2000, round(1 / (1 - decays)))
    for _ in range(steps):
        optimizer.step()
    state = optimizer.state[member]
    low = state["exp_avg_sq_low"].double() if "exp_avg_sq_low" in state else 0
    left = ((state["exp_avg_sq"].double() + low) / before).mean()
    assert lowest <= float(left.log()) / (steps * math.log(decays)) <= highest


def test_learning_rate_below_half_an_ulp(caplog):
    said = findings(
        caplog,
        lambda: CollageAdamW(parameters(), lr=1e-5, betas=(0.9, 0.95), strategy="plain"),
        steps=2,
    )
    assert len(said) == 1
    assert "lr=1e-05 is below half an ulp of a typical weight in 4 of 4 tensors" in said[0]
    assert "use strategy 'light' or 'plus'" in said[0]


def test_learning_rate_below_the_low_component(caplog):
    make = lambda: CollageAdamW(parameters(scale=1.0), lr=1e-7, strategy="plus")  # noqa: E731
    said = findings(caplog, make, steps=1)
    assert len(said) == 1
    assert "use strategy 'light-stochastic' or 'master-weights'" in said[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: CollageAdamW(parameters(), lr=1e-3, betas=(0.9, 0.95), strategy="plain"),
        lambda: CollageSGD(parameters(), lr=1e-9, strategy="plain"),
        lambda: CollageAdamW(parameters(torch.float32), lr=1e-12, strategy="plain"),
        lambda: CollageLion(parameters(), lr=1e-7, strategy="light-stochastic"),
        lambda: CollageAdamW(parameters(), lr=0.0, strategy="plus"),
    ],
)
def test_nothing_is_said_of_other_learning_rates(caplog, make):
    assert findings(caplog, make, steps=1) == []


def test_a_warm_up_is_judged_by_its_own_rate(caplog):
    def make():
        optimizer = CollageAdamW(parameters(), lr=1e-3, betas=(0.9, 0.95), strategy="plain")
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-4)
        return optimizer

    assert findings(caplog, make, steps=1) == []


def test_said_once(caplog):
    def make():
        return [CollageAdamW(parameters(), strategy="light") for _ in range(3)][-1]

    assert len(findings(caplog, make)) == 1


def test_float16_second_moments(caplog):
    said = findings(caplog, lambda: CollageAdamW(parameters(torch.float16), strategy="light"))
    assert any("is zero for gradients below 5.5e-03 (decay 0.999)" in line for line in said)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "plus"}, "float16's range makes no better than one number: use bfloat16"),
        ({"strategy": "light", "arithmetic": "storage"}, "eps=1e-08 rounds to zero in float16"),
    ],
)
def test_float16_is_refused_where_it_means_nothing(options, words):
    with pytest.raises(ValueError, match=words):
        CollageAdamW(parameters(torch.float16), **options)
