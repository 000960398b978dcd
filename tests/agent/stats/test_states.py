"""Moving averages: decrements against exact fractions, zeros where the gradient is not against plain counting."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collage_agent.stats.optimizer_state import measure_states, state_change_block_sums, zero_block_counts
from collage_agent.stats.step_view import MovingAverages
from torch import nn

from tests.agent.training import mean_square, watched
from tests.reference import diagnostics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("growing", [(), (0,), (1,), (0, 1)])
def test_changes_equal_the_exact_sums_of_an_average_and_of_a_sum(growing, seed):
    """What is stored may grow where the average should shrink, and shrink where it should grow."""
    generator = torch.Generator().manual_seed(seed)
    before, drawn = torch.randn(2, 2, 320, generator=generator, dtype=torch.float64)
    intended = before * 0.9 + 0.2 * drawn
    intended[:, :160] = before[:, :160] * (1.0 + 1e-3 * drawn[:, :160])
    observed = intended.to(torch.bfloat16).double()
    found = state_change_block_sums(
        torch.stack((before.abs(), intended, observed)), torch.zeros(320, dtype=torch.uint8), 32, growing
    ).sum(-1)
    for place in range(2):
        rows = [diagnostics.exact(values[place]) for values in (before, intended, observed)]
        seen, wanted = (diagnostics.increments if place in growing else diagnostics.decrements)(*rows)
        assert found[:, place].tolist() == pytest.approx([float(wanted), float(seen)], rel=1e-12)


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "begin", "health"),
    [(BF16, 0.0, "healthy"), (BF16, 1000.0, "states are stuck"), (FP32, 1000.0, "healthy")],
)
def test_a_sum_takes_the_share_of_its_fp64_twins_growth(dtype, begin, health):
    """Each g² adds to Adagrad's sum. Measured whole in every step, the changes are those of the whole way."""
    torch.manual_seed(2)
    adagrad = partial(torch.optim.Adagrad, lr=0.05 * max(begin, 1.0) ** 0.5, initial_accumulator_value=begin)
    model, optimizer, handle = watched(adagrad, nn.Linear(48, 48).to(dtype), sample="all")
    twins = [torch.full_like(weight, begin, dtype=torch.float64) for weight in model.parameters()]
    for _ in range(24):
        for weight, twin in zip(model.parameters(), twins, strict=True):
            weight.grad = torch.randn(weight.shape).to(dtype)
            twin += weight.grad.double() ** 2
        optimizer.step()
    stored = [optimizer.state[weight]["sum"].double() for weight in model.parameters()]
    true = sum(float((own - begin).sum()) for own in stored) / sum(float((twin - begin).sum()) for twin in twins)
    found = handle.evidence().model
    assert "state_decrement_ratio/sum" not in found
    assert found["state_increment_ratio/sum"] == pytest.approx(true, rel=1e-9)
    assert handle.judgement().health == health
    assert (true < 0.9) == (health != "healthy")


@pytest.mark.parametrize(
    ("excluded", "intended", "change"),
    [(1, [0.5, 0.5, torch.inf], -0.5), (0, [0.5, 0.25, torch.inf], -1.25), (0, [-0.5, -0.25, -torch.inf], -1.25)],
)
def test_elements_left_out_and_states_that_are_not_finite_enter_no_sum(excluded, intended, change):
    before = torch.tensor([[1.0, 1.0, torch.inf, 1.0]], dtype=torch.float64)
    after = torch.tensor([[*intended, torch.nan]], dtype=torch.float64)
    left_out = torch.tensor([excluded, 0, 0, 0], dtype=torch.uint8)
    found = state_change_block_sums(torch.stack((before, after, after)), left_out, 4)
    assert found[:, 0, 0].tolist() == [change, change]


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_an_average_as_stored_is_the_sum_of_its_components(count, finite):
    generator = torch.Generator().manual_seed(3)
    before, drawn, gradient = torch.randn(3, 320, generator=generator, dtype=torch.float64)
    intended = before * 0.9 + 0.1 * drawn
    high = intended.to(torch.bfloat16)
    high[:40] = 0.0
    low = (intended - high.double()).to(torch.bfloat16)
    low[:20] = 0.0
    excluded = (torch.arange(320) % 7 == 0).to(torch.uint8) * (not finite)
    gradient[::3] = gradient[excluded.bool()] = 0.0
    components = (high, low)[:count]
    states = torch.stack((before.abs(), intended, torch.full_like(intended, torch.nan))).unsqueeze(1)
    step: Any = SimpleNamespace(
        averages=MovingAverages(("exp_avg",), states, ("exp_avg",), {"exp_avg": components}),
        intended_known=True,
        finite=finite,
        excluded=excluded,
        gradient=gradient,
        block=32,
        block_elements=torch.full((10,), 32.0, dtype=torch.float64),
        classes={"nonfinite": excluded.view(10, 32).sum(1)},
    )
    found = {key: float(sums.sum()) for key, sums in measure_states(step).by_block.items()}
    stored = sum((part.double() for part in components), torch.zeros(320, dtype=torch.float64))
    gradients, *exact = (
        diagnostics.exact(values[excluded == 0]) for values in (gradient, before, intended, stored)
    )
    observed, wanted = diagnostics.decrements(*exact)
    assert found["state_decrement_observed_sum/exp_avg"] == pytest.approx(float(observed), rel=1e-12)
    assert found["state_decrement_intended_sum/exp_avg"] == pytest.approx(float(wanted), rel=1e-12)
    nonzero, zero = diagnostics.zeros(gradients, exact[2])
    assert (found["gradient_nonzero"], found["state_zero/exp_avg"]) == (nonzero, zero)


def test_a_zero_of_either_sign_counts_and_a_low_component_that_is_not_zero_prevents_it():
    gradient = torch.tensor([0.0, -0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0] * 2, dtype=torch.float64)
    state = torch.tensor([0.0, 1.0, 0.0, -0.0, 1e-9, 1.0, 0.0, 0.0] * 2, dtype=torch.float64)
    excluded = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1] + [1] * 8, dtype=torch.uint8)
    found = zero_block_counts(gradient, [state, gradient], excluded, 8)
    assert found.tolist() == [[2.0, 0.0], [2.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(("scale", "least"), [(1.0, 0.0), (2.0**16, 0.01), (2.0**20, 0.9)])
def test_infinite_states_equal_plain_counting(scale, least):
    """A loss scale that is never taken out of the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)).half()
    make = partial(torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.95), eps=1e-6)
    _, optimizer, handle = watched(
        make, model, 12, lambda own, _: mean_square(own, torch.randn(8, 24)) * scale, sample="all"
    )
    found = handle.summary()["model"]
    for name in ("exp_avg", "exp_avg_sq"):
        states = torch.cat([state[name].flatten() for state in optimizer.state.values()])
        assert found[f"state_infinite_ratio/{name}"] == float(states.isinf().double().mean())
    assert found["state_infinite_ratio/exp_avg_sq"] >= least
    assert (handle.judgement().health == "not finite") == (scale > 1)
