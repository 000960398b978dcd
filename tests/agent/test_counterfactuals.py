"""Counterfactuals of real steps: from the same θ and u, about once in a hundred steps."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.watching.governor import Governor
from collage_optim import CollageAdamW

from tests.agent.step.test_measurer import step_with_reference, totals_of
from tests.agent.training import mlp, train
from tests.reference import diagnostics

KEPT = "counterfactual_kept_sum"


@pytest.mark.slow
def test_an_fp32_run_says_what_16_bits_would_have_kept():
    model = mlp(dtype=torch.float32, width=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = watch(model, optimizer, every=1, sample="all", first_step=98)
    for step in range(3):
        expected = step_with_reference(model, optimizer, step)
    for layer, totals in totals_of(handle).items():
        theta, _, u, _ = expected[layer]
        scale = Fraction(float(theta.abs().max()) / 448)
        exact = diagnostics.counterfactuals(diagnostics.exact(theta), diagnostics.exact(u), scale)
        assert totals["counterfactual_squared_sum"] == pytest.approx(float(exact["squared"]), rel=1e-9)
        for key, name in (
            (f"{KEPT}/plain/bf16", "plain"),
            (f"{KEPT}/light/bf16", "light"),
            (f"{KEPT}/plain/fp8", "fp8"),
            ("counterfactual_variance_sum/stochastic/bf16", "variance"),
        ):
            assert totals[key] == pytest.approx(float(exact[name]), rel=1e-6, abs=1e-12), key
    train(model, optimizer, 1, start=3)
    values = handle.summary()["model"]
    assert handle.summary()["step"] == 101
    assert values["counterfactual_edq_ratio/plain/bf16"] < 0.9
    assert values["counterfactual_edq_ratio/light/bf16"] == pytest.approx(1.0, abs=1e-3)
    assert values["counterfactual_edq_ratio/stochastic/bf16"] == 1.0
    assert values["counterfactual_edq_ratio/plain/fp8"] < 0.5
    assert values["counterfactual_variance_ratio/stochastic/bf16"] > 1.0


def test_of_a_plain_run_the_plain_counterfactual_is_what_happened():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    handle = watch(model, optimizer, every=1, sample=1024, budget=None, first_step=98)
    train(model, optimizer, 3)
    values = handle.summary()["model"]
    assert values["counterfactual_edq_ratio/plain/bf16"] == pytest.approx(values["edq_ratio"], rel=1e-3)


@pytest.mark.parametrize("strategy", ["light", "master-weights"])
def test_of_our_own_optimizers_they_start_from_the_stored_weight(strategy):
    model = mlp()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, strategy=strategy)
    handle = watch(model, optimizer, every=1, sample=1024, budget=None, first_step=98)
    train(model, optimizer, 3)
    values = handle.summary()["model"]
    assert values["counterfactual_edq_ratio/light/bf16"] == pytest.approx(1.0, abs=1e-2)
    assert abs(1 - values["counterfactual_edq_ratio/plain/bf16"]) > 0.02


@pytest.mark.parametrize(("every", "steps"), [(1, [100, 200]), (10, [100, 200]), (64, [128]), (500, [])])
def test_they_are_made_at_measured_steps_about_once_in_a_hundred(every, steps):
    governor = Governor(every, 4096, None)
    measured = [step for step in range(1, 256) if step % governor.interval == 0]
    assert [step for step in measured if governor.counterfactuals_due(step)] == steps
    governor.doublings = 1
    assert [step for step in measured if governor.counterfactuals_due(step)] == [
        2 * step for step in steps if step < 128
    ]


def test_values_that_are_not_finite_leave_the_others_alone():
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    handle = watch(model, optimizer, every=1, sample="all", first_step=100)
    with torch.no_grad():
        model[4].bias[0] = torch.inf
    train(model, optimizer, 1)
    values = handle.summary()["layers"]["4.bias"]
    assert values["nonfinite"] >= 1
    assert values["counterfactual_edq_ratio/light/bf16"] == pytest.approx(1.0, abs=1e-2)
    assert values["counterfactual_edq_ratio/plain/fp8"] is not None
