"""Counterfactuals against exact fractions, and of real steps: from the same θ and u, about once in a hundred."""

from fractions import Fraction
from functools import partial

import pytest
import torch
from collage_agent.stats.counterfactuals import COUNTERFACTUAL_SUMS, counterfactual_block_sums, fp8_scales
from collage_agent.watching.governor import Governor
from collage_optim import CollageAdamW

from tests.agent.step.test_measurer import step_with_reference, totals_of
from tests.agent.training import adamw, mlp, train, watched
from tests.reference import diagnostics
from tests.reference.expansions import LAYOUTS

NAMES = ("squared", "plain", "light", "stochastic", "fp8", "variance")


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("size", [1e-4, 3e-3, 0.1])
@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_every_method_equals_the_exact_one(size, stored):
    generator = torch.Generator().manual_seed(11)
    theta = torch.randn(640, generator=generator, dtype=torch.float64).to(stored).double()
    theta[:16] = 2.0 ** torch.arange(-10, 6)
    u = size * theta.abs() * torch.randn(640, generator=generator, dtype=torch.float64)
    u[16:40] = 0.0
    scale = fp8_scales(theta, torch.zeros(20, dtype=torch.int64), 1, 32)
    assert float(scale[0]) == float(theta.abs().max()) / 448
    expected = diagnostics.counterfactuals(
        diagnostics.exact(theta), diagnostics.exact(u), Fraction(float(scale[0]))
    )
    found = counterfactual_block_sums(theta, u, scale, 32).sum(1).tolist()
    assert len(found) == len(COUNTERFACTUAL_SUMS) == len(NAMES)
    for name, value in zip(NAMES, found, strict=True):
        assert value == pytest.approx(float(expected[name]), rel=1e-9), name


def test_scales_are_by_tensor_and_a_tensor_of_zeros_is_kept_as_it_is():
    theta = torch.tensor([1.0, -448.0, 0.0, 0.0, 7.0, 0.0], dtype=torch.bfloat16)
    scales = fp8_scales(theta, torch.tensor([2, 0, 2]), 3, 2)
    assert scales.tolist() == [1.0, 1.0, 1.0]
    assert fp8_scales(theta * 2, torch.tensor([2, 0, 2]), 3, 2).tolist() == [2.0, 1.0, 2.0]
    still = torch.zeros(2, dtype=torch.float64)
    assert not counterfactual_block_sums(still, still, scales[1:2], 2).any()


def test_stochastic_rounding_really_has_this_variance():
    theta = torch.tensor([1.0, 1.0, -3.0, 0.7], dtype=torch.float64).to(torch.bfloat16).double()
    u = torch.tensor([1e-3, -1e-3, 5e-3, -2e-4], dtype=torch.float64)
    sums = [Fraction(x) for x in (theta + u).tolist()]
    below, above = zip(*(diagnostics.neighbours(LAYOUTS["bfloat16"], x) for x in sums), strict=True)
    low, high = (torch.tensor([float(x) for x in side], dtype=torch.float64) for side in (below, above))
    draws = torch.rand(40_000, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen = torch.where(draws < (theta + u - low) / (high - low), high, low)
    assert torch.allclose(seen.mean(0) - theta, u, atol=5e-5)
    variance = counterfactual_block_sums(theta, u, torch.ones(1, dtype=torch.float64), 4)[-1, 0]
    assert float(variance) == pytest.approx(float(seen.var(0).sum()), rel=0.03)


@pytest.mark.slow
def test_an_fp32_run_says_what_16_bits_would_have_kept():
    wide = mlp(dtype=torch.float32, width=24)
    model, optimizer, handle = watched(partial(adamw, lr=1e-4), wide, sample="all", first_step=98)
    for step in range(3):
        expected = step_with_reference(model, optimizer, step)
    for layer, totals in totals_of(handle).items():
        theta, _, u, _ = expected[layer]
        scale = Fraction(float(theta.abs().max()) / 448)
        exact = diagnostics.counterfactuals(diagnostics.exact(theta), diagnostics.exact(u), scale)
        assert totals["counterfactual_squared_sum"] == pytest.approx(float(exact["squared"]), rel=1e-9)
        for key, name in (
            ("kept_sum/plain/bf16", "plain"),
            ("kept_sum/light/bf16", "light"),
            ("kept_sum/plain/fp8", "fp8"),
            ("variance_sum/stochastic/bf16", "variance"),
        ):
            assert totals[f"counterfactual_{key}"] == pytest.approx(float(exact[name]), rel=1e-6, abs=1e-12), key
    train(model, optimizer, 1, start=3)
    values = handle.summary()["model"]
    assert handle.summary()["step"] == 101
    assert values["counterfactual_edq_ratio/plain/bf16"] < 0.9
    assert values["counterfactual_edq_ratio/light/bf16"] == pytest.approx(1.0, abs=1e-3)
    assert values["counterfactual_edq_ratio/stochastic/bf16"] == 1.0
    assert values["counterfactual_edq_ratio/plain/fp8"] < 0.5
    assert values["counterfactual_variance_ratio/stochastic/bf16"] > 1.0


@pytest.mark.parametrize(
    "make",
    [
        partial(adamw, weight_decay=0.0, fused=True),
        *(partial(CollageAdamW, lr=1e-3, strategy=strategy) for strategy in ("light", "master-weights")),
    ],
    ids=["plain", "light", "master-weights"],
)
def test_of_a_plain_run_the_plain_one_is_what_happened_and_ours_start_from_the_stored_weight(make):
    _, _, handle = watched(make, sample=1024, first_step=98, steps=3)
    values = handle.summary()["model"]
    plain, light = (values[f"counterfactual_edq_ratio/{name}/bf16"] for name in ("plain", "light"))
    if make.func is adamw:
        assert plain == pytest.approx(values["edq_ratio"], rel=1e-3)
    else:
        assert light == pytest.approx(1.0, abs=1e-2)
        assert abs(1 - plain) > 0.02


@pytest.mark.parametrize(("every", "steps"), [(1, [100, 200]), (10, [100, 200]), (64, [128]), (500, [])])
def test_they_are_made_at_measured_steps_about_once_in_a_hundred(every, steps):
    governor = Governor(every, 4096, None)
    measured = [step for step in range(1, 256) if step % governor.interval == 0]
    assert [step for step in measured if governor.counterfactuals_due(step)] == steps
    governor.doublings = 1
    doubled = [2 * step for step in steps if step < 128]
    assert [step for step in measured if governor.counterfactuals_due(step)] == doubled


def test_values_that_are_not_finite_leave_the_others_alone():
    sgd = partial(torch.optim.SGD, lr=1e-2)
    model, optimizer, handle = watched(sgd, mlp(dtype=torch.float32), sample="all", first_step=100)
    with torch.no_grad():
        model[4].bias[0] = torch.inf
    train(model, optimizer, 1)
    values = handle.summary()["layers"]["4.bias"]
    assert values["nonfinite"] >= 1
    assert values["counterfactual_edq_ratio/light/bf16"] == pytest.approx(1.0, abs=1e-2)
    assert values["counterfactual_edq_ratio/plain/fp8"] is not None
