"""Decay, residuals and zero states of real steps against the live optimizer's own tensors."""

from functools import partial

import pytest
import torch
from collage_optim import CollageAdamW

from collage_monitor.metrics import HISTOGRAM_LABELS
from tests.agent.step.test_measurer import totals_of
from tests.agent.training import adamw, backward, gpt_loss, mlp, small_gpt, train, watched
from tests.reference import diagnostics
from tests.reference.expansions import LAYOUTS

light = partial(CollageAdamW, lr=1e-3, strategy="light")


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("lr", [1e-3, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decay_of_a_step_equals_the_exact_sums(dtype, lr):
    model, optimizer, handle = watched(partial(adamw, lr=lr, weight_decay=0.1), mlp(dtype=dtype), sample="all")
    train(model, optimizer, 1)
    before = {name: p.detach().double().flatten().clone() for name, p in model.named_parameters()}
    train(model, optimizer, 1, start=1)
    layout = LAYOUTS[str(dtype).removeprefix("torch.")]
    for layer, totals in totals_of(handle).items():
        kept, intended = diagnostics.decay(diagnostics.exact(before[layer]), lr * 0.1, layout)
        assert totals["decay_squared_sum"] == pytest.approx(float(intended), rel=1e-12)
        assert totals["decay_kept_sum"] == pytest.approx(float(kept), rel=1e-12, abs=1e-300)
    ratio = handle.summary()["model"]["decay_ratio"]
    assert ratio == 0.0 if dtype == torch.bfloat16 and lr < 0.1 else ratio > 0.5


def test_coupled_decay_is_undefined():
    model, optimizer, handle = watched(partial(torch.optim.Adam, weight_decay=0.1))
    train(model, optimizer, 2)
    assert "decay_ratio" not in handle.summary()["model"]


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["all", 256])
def test_residuals_of_a_pair_equal_the_exact_ones(sample):
    model, optimizer, handle = watched(light, mlp(width=40), sample=sample)
    train(model, optimizer, 1)
    first = handle.summary()["model"]
    assert first["residual_zero_ratio"] == 1.0
    assert first["residual_fill_ratio"] == 0.0
    train(model, optimizer, 1, start=1)
    named = dict(model.named_parameters())
    kept = {name: optimizer.stored_parameter(p).flatten() for name, p in named.items()}
    before = {name: p.detach().double().flatten() for name, p in named.items()}
    train(model, optimizer, 1, start=2)
    for layer, totals in totals_of(handle).items():
        values, residual = before[layer], kept[layer] - before[layer]
        assert totals["residual_elements"] == pytest.approx(values.numel())
        if sample != "all":
            continue
        zero, fill, octaves = diagnostics.residuals(diagnostics.exact(residual), values.tolist(), torch.bfloat16)
        assert totals["residual_zero"] == zero
        assert totals["residual_fill_sum"] == pytest.approx(float(fill), rel=1e-12)
        assert [totals[f"residual_fill_histogram/{label}"] for label in HISTOGRAM_LABELS] == octaves
    model_values = handle.summary()["model"]
    assert 0.3 < model_values["residual_fill_ratio"] < 0.6
    assert model_values["residual_zero_ratio"] < 0.2
    assert model_values["residual_nonfinite"] == 0


def test_a_residual_that_is_zero_again_was_dropped():
    model, optimizer, handle = watched(light, sample="all")
    train(model, optimizer, 1)
    assert handle.summary()["model"]["residual_dropped_ratio"] == 0.0
    train(model, optimizer, 4, start=1)
    assert handle.summary()["model"]["residual_dropped_ratio"] < 0.02
    dropped = optimizer.state[model[0].weight]["parameter_low"]
    held = int(dropped.count_nonzero())
    dropped.zero_()
    train(model, optimizer, 1, start=5)
    layers = handle.summary()["layers"]
    assert ("residual_dropped_ratio", "0.weight") in [(one.key, one.layer) for one in handle.judgement().against]
    assert 0 < held <= 30 * 70
    assert totals_of(handle)["0.weight"]["residual_dropped"] == held
    assert layers["0.weight"]["residual_dropped_ratio"] == pytest.approx(held / (30 * 70))
    assert layers["2.weight"]["residual_dropped_ratio"] < 0.05
    train(model, optimizer, 1, start=6)
    assert handle.summary()["model"]["residual_dropped_ratio"] < 0.02


def test_a_residual_that_is_not_finite_is_counted_and_left_out():
    model, optimizer, handle = watched(light, sample="all")
    train(model, optimizer, 2)
    optimizer.state[model[0].weight]["parameter_low"][0, :3] = torch.nan
    train(model, optimizer, 1, start=2)
    values = handle.summary()["layers"]["0.weight"]
    assert values["residual_nonfinite"] == 3
    assert totals_of(handle)["0.weight"]["residual_elements"] == 30 * 70 - 3
    assert values["residual_fill_ratio"] < 0.6


@pytest.mark.slow
def test_states_that_underflow_are_counted_where_the_gradient_is_not_zero():
    model, optimizer, handle = watched(model=small_gpt(layers=1), sample="all")
    train(model, optimizer, 3, gpt_loss)
    with torch.no_grad():
        optimizer.state[model.position.weight]["exp_avg_sq"][:3] = 0.0
    backward(model, 3, gpt_loss)
    model.position.weight.grad[:3] *= 1e-30
    named = dict(model.named_parameters())
    gradients = {name: p.grad.double().flatten().clone() for name, p in named.items()}
    optimizer.step()
    for layer, totals in totals_of(handle).items():
        for state in ("exp_avg", "exp_avg_sq"):
            after = optimizer.state[named[layer]][state].double().flatten()
            nonzero, zero = diagnostics.zeros(diagnostics.exact(gradients[layer]), diagnostics.exact(after))
            assert totals["gradient_nonzero"] == nonzero
            assert totals[f"state_zero/{state}"] == zero
    values = handle.summary()["layers"]["position.weight"]
    assert values["state_zero_ratio/exp_avg_sq"] > values["state_zero_ratio/exp_avg"] == 0.0
