"""Decoupled decay as a rounded operation of its own, against exact fractions."""

from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collage_agent.stats.optimizer_state import decay_block_sums, decay_is_lost, measure_decay
from collage_agent.step.layout import decoupled_rate
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageSGD

from tests.agent.intent.optimizers import ByParameter
from tests.agent.training import watched
from tests.reference import diagnostics
from tests.reference.expansions import LAYOUTS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NONE_LEFT_OUT = torch.zeros(320, dtype=torch.uint8)


def weights(dtype):
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(320, generator=generator) * 2.0 ** torch.randint(-20, 3, (320,), generator=generator)
    values[:8] = 2.0 ** torch.arange(-4, 4)
    values[8] = 1.5
    return values.to(dtype).double()


@pytest.mark.parametrize("rate", [0.2, 1.5 * 2**-9, 2**-9, 1e-3, 2e-5, 2**-25, "1/3", "5/3", "7/3", "11/3"])
@pytest.mark.parametrize("name", DTYPES)
def test_decay_sums_equal_the_exact_ones(name, rate):
    """By thirds of eps 1.5 comes so close to a tie that its product in fp64 is one."""
    dtype, values = DTYPES[name], weights(DTYPES[name])
    rate = float(Fraction(rate) * Fraction(torch.finfo(dtype).eps)) if isinstance(rate, str) else rate
    kept, intended = diagnostics.decay(diagnostics.exact(values), rate, LAYOUTS[name])
    found = decay_block_sums(values, rate, dtype, NONE_LEFT_OUT, 32).sum(1)
    assert float(found[0]) == pytest.approx(float(kept), rel=1e-12, abs=1e-300)
    assert float(found[1]) == pytest.approx(float(intended), rel=1e-12)
    if decay_is_lost(rate, dtype):
        assert kept == 0
    tensor = decay_block_sums(values, torch.tensor(rate, dtype=torch.float64), dtype, NONE_LEFT_OUT, 32).sum(1)
    assert torch.equal(tensor, found)


def test_where_decay_moves_nothing_is_known_without_looking():
    assert decay_is_lost(2**-9 - 1e-9, torch.bfloat16)
    assert not decay_is_lost(2**-9, torch.bfloat16)
    assert not decay_is_lost(2e-5, torch.float32)
    assert not decay_is_lost(torch.tensor(1e-30), torch.bfloat16)


@pytest.mark.parametrize("rate", [1e-4, 0.1])
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("is_sum", [True, False])
def test_the_visible_weight_decays_whatever_is_kept_beside_it(is_sum, finite, rate):
    visible = weights(torch.bfloat16)
    excluded = (torch.arange(320) % 7 == 0).to(torch.uint8) * (not finite)
    left_out = excluded.bool()
    parameter = visible * (1.0 + 2**-10 * is_sum)
    parameter[left_out] = 0.0
    step: Any = SimpleNamespace(
        decay=rate,
        registered=visible.to(torch.bfloat16),
        parameter=parameter,
        visible_parameter=visible.masked_fill(left_out, torch.inf) if is_sum else parameter,
        squares={"parameter": parameter.square().view(10, 32).sum(1)},
        excluded=excluded,
        finite=finite,
        block=32,
    )
    found = measure_decay(step).by_block
    kept, squared = diagnostics.decay(diagnostics.exact(visible[~left_out]), rate, LAYOUTS["bfloat16"])
    assert float(found["decay_kept_sum"].sum()) == pytest.approx(float(kept), rel=1e-12)
    assert float(found["decay_squared_sum"].sum()) == pytest.approx(float(squared), rel=1e-12)
    assert (kept == 0) == decay_is_lost(rate, torch.bfloat16)


class Random(ByParameter):
    """AdamW that rounds its update at random; the decay is a product in bfloat16 before it, or part of it."""

    def step_one(self, own, group):
        state, decay = self.state[own], group["lr"] * group["weight_decay"]
        gradient = own.grad.to(torch.promote_types(own.dtype, torch.float32))
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 0.1)
        state["exp_avg_sq"].lerp_(gradient.square(), 0.05)
        if group["apart"]:
            own.mul_(1 - decay)
        wide = own.to(gradient.dtype) if group["apart"] else own.to(gradient.dtype) * (1 - decay)
        root = (state["exp_avg_sq"] / (1 - 0.95 ** state["step"])).sqrt() + 1e-8
        wide = wide.addcdiv(state["exp_avg"] / (1 - 0.9 ** state["step"]), root, value=-group["lr"])
        if own.dtype == torch.bfloat16:
            noise = torch.randint_like(wide, 0, 65536, dtype=torch.int32)
            wide = ((wide.view(torch.int32) + noise) & -65536).view(torch.float32)
        own.copy_(wide)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apart", "decay", "health"), [(True, 0.5, "decay is lost"), (False, 0.5, "healthy"), (True, 0.0, "healthy")]
)
def test_decay_that_is_rounded_by_itself_is_lost_beside_an_update_rounded_at_random(apart, decay, health):
    """Of 16,384 elements none decayed, and the word was "healthy"."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64)).bfloat16()

    def loss(own, step):
        inputs = torch.randn(32, 64).bfloat16()
        return (own(inputs).float() - inputs.float()).square().mean()

    make = partial(Random, weight_decay=decay, betas=(0.9, 0.95), apart=apart)
    _, _, handle = watched(make, model, 40, loss, sample="all", windows=(16,))
    kept = handle.summary()["model"].get("decay_ratio")
    assert kept is None if health == "healthy" else kept < 0.05
    assert handle.judgement().health == health


@pytest.mark.parametrize(
    ("kind", "options", "rate"),
    [
        (torch.optim.AdamW, {}, 0.125),
        (torch.optim.AdamW, {"lr": torch.tensor(0.5)}, 0.125),
        (torch.optim.Adam, {}, None),
        (torch.optim.NAdam, {"decoupled_weight_decay": True}, 0.125),
        (torch.optim.SGD, {}, None),
        (CollageAdamW, {}, 0.125),
        (CollageLion, {}, 0.125),
        (CollageAdam, {}, None),
        (CollageSGD, {}, None),
    ],
)
def test_only_decoupled_decay_has_a_rate(kind, options, rate):
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = kind([weight], **{"lr": 0.5, "weight_decay": 0.25, **options})
    assert decoupled_rate(optimizer, optimizer.param_groups[0]) == rate
