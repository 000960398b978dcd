"""u of our own optimizers, as the agent finds it on the host, against extended precision."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from collage_agent.intent import OwnRuleIntent
from collage_optim import CollageAdam, CollageAdamW

LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8
OPTIONS: dict[str, Any] = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS}
ELEMENTS = 4099
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (CollageAdamW, {"weight_decay": 0.1}),
    "without decay": (CollageAdamW, {"weight_decay": 0.0}),
    "maximize": (CollageAdamW, {"maximize": True}),
    "amsgrad": (CollageAdamW, {"amsgrad": True}),
    "a rate that is a tensor": (CollageAdamW, {"lr": torch.tensor(1e-3, dtype=torch.float64)}),
    "Adam": (CollageAdam, {}),
    "Adam with decay": (CollageAdam, {"weight_decay": 0.1}),
}


def drawn(step, amsgrad):
    generator = torch.Generator().manual_seed(step)
    weight, gradient, first, second, largest = torch.randn(5, ELEMENTS, generator=generator, dtype=torch.float64)
    state = {"exp_avg": first * 0.3, "exp_avg_sq": second.square() * 0.1}
    if amsgrad:
        state["max_exp_avg_sq"] = largest.square() * 0.1
    return weight * 0.02, gradient, state if step > 1 else {}


def in_extended_precision(kind, group, state, weight, gradient, step):
    """u, and the averages after the step."""
    long = np.longdouble
    theta, g = (values.numpy().astype(long) for values in (weight, gradient))
    kept = {name: values.numpy().astype(long) for name, values in state.items()}
    decay = long(group["weight_decay"])
    g = -g if group["maximize"] else g
    if kind is CollageAdam:
        g, decay = g + decay * theta, long(0)
    first = long(BETA1) * kept.get("exp_avg", 0) + (1 - long(BETA1)) * g
    second = long(BETA2) * kept.get("exp_avg_sq", 0) + (1 - long(BETA2)) * g * g
    after = {"exp_avg": first, "exp_avg_sq": second}
    if group["amsgrad"]:
        second = after["max_exp_avg_sq"] = np.maximum(kept.get("max_exp_avg_sq", 0), second)
    denominator = np.sqrt(second) / np.sqrt(long(1) - long(BETA2) ** step) + long(EPS)
    return -long(LR) / (1 - long(BETA1) ** step) * first / denominator - long(LR) * decay * theta, after


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("case", CASES)
def test_u_and_the_averages_are_exact_but_for_the_rounding_of_fp64(case, step):
    kind, options = CASES[case]
    member = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = kind([member], **{**OPTIONS, **options})
    group = optimizer.param_groups[0]
    weight, gradient, state = drawn(step, group["amsgrad"])
    expected, averages = in_extended_precision(kind, group, state, weight, gradient, step)
    given = weight.clone(), gradient.clone()
    found = torch.full_like(weight, math.nan)
    state["step"] = torch.tensor(step - 1.0)
    assert OwnRuleIntent(optimizer, group).displacement(group, state, weight, gradient, found)
    # Where the average of both signs comes to nearly nothing, its own rounding is what is left of it.
    np.testing.assert_allclose(found.numpy(), expected.astype(float), rtol=1e-12, atol=1e-15 * LR)
    for name, values in averages.items():
        np.testing.assert_allclose(state[name].numpy(), values.astype(float), rtol=1e-14, atol=1e-15)
    assert state["step"] == step
    assert torch.equal(weight, given[0])
    assert torch.equal(gradient, given[1])
