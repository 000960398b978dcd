"""Residuals, master weights and stochastic rounding are found by what they do, whatever they are called."""

from __future__ import annotations

import copy
import operator

import optimi
import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from collage_agent.intent.observed_storage import observe_storage
from collage_agent.intent.selftest import run_selftest
from collage_agent.intent.weight_bits import UnsignedBits
from collage_agent.sample.stored_parts import PLAIN, Composition
from torch import nn

from tests.agent.intent import optimizers
from tests.agent.training import gpt_loss, mlp, small_gpt, train


def seen(make, dtype=torch.bfloat16):
    parameters = [nn.Parameter(torch.randn(8, 4).to(dtype)), nn.Parameter(torch.randn(4).to(dtype))]
    optimizer = make(parameters)
    group = optimizer.param_groups[0]
    return observe_storage(optimizer, group, run_selftest(optimizer, group))


ADDED = Composition(residual="kahan_comp")
RESIDUALS = {
    "subtracted": (optimizers.Subtracting, Composition(residual="b", sign=-1)),
    "added": (optimizers.Adding, Composition(residual="b")),
    "optimi AdamW": (lambda p: optimi.AdamW(p, lr=1e-3, weight_decay=0.1), ADDED),
    "optimi AdamW foreach": (lambda p: optimi.AdamW(p, lr=1e-3, foreach=True), ADDED),
    "optimi SGD": (lambda p: optimi.SGD(p, lr=1e-2, momentum=0.9, kahan_sum=True), ADDED),
    "optimi Lion": (lambda p: optimi.Lion(p, lr=1e-4), ADDED),
    "optimi Adan": (lambda p: optimi.Adan(p, lr=1e-3, kahan_sum=True), ADDED),
    "optimi Ranger, which looks ahead": (lambda p: optimi.Ranger(p, lr=1e-3), ADDED),
    "optimi StableAdamW": (lambda p: optimi.StableAdamW(p, lr=1e-3), ADDED),
    "pytorch_optimizer StableAdamW": (lambda p: pytorch_optimizer.StableAdamW(p, lr=1e-3), ADDED),
}
NONE = {
    "momentum": optimizers.Momentum,
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "AdamW rate 0": lambda p: torch.optim.AdamW(p, lr=0.0),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "optimi AdamW without": lambda p: optimi.AdamW(p, lr=1e-3, kahan_sum=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Lamb": lambda p: pytorch_optimizer.Lamb(p),
}


@pytest.mark.filterwarnings("ignore:Parameter .foreach. is deprecated:DeprecationWarning")
@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RESIDUALS)
def test_a_residual_is_found_with_its_sign(name, dtype):
    make, expected = RESIDUALS[name]
    found = seen(make, dtype)
    assert (found.composition, found.failure) == (expected, None)
    assert found.stochastic is False


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NONE)
def test_moving_averages_are_no_residuals(name, dtype):
    found = seen(NONE[name], dtype)
    assert (found.composition, found.stochastic, found.failure) == (PLAIN, False, None)


def test_a_master_weight_is_found():
    assert seen(optimizers.Master).composition == Composition(master="b")


def test_stochastic_rounding_is_found():
    found = seen(optimizers.Stochastic)
    assert (found.composition, found.stochastic) == (PLAIN, True)


def test_what_cannot_be_stepped_is_not_known():
    found = seen(lambda p: torch.optim.LBFGS(p))
    assert (found.composition, found.stochastic) == (PLAIN, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Subtracting", "Adding", "Master"])
def test_stored_and_visible_are_told_apart(name):
    model = small_gpt()
    optimizer = getattr(optimizers, name)(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1, sample="all", oracle=True)
    train(model, optimizer, 5, gpt_loss)
    values = handle.summary()["model"]
    assert values["edq_ratio"] == pytest.approx(1.0, abs=0.01)
    assert values["edq_oracle_ratio"] == pytest.approx(1.0, abs=0.02)
    assert values["lost_update_ratio"] < 0.1
    assert values["lost_visible_ratio"] > 0.2


LATER = {
    "residual": lambda p: optimi.AdamW(p, lr=1e-3),
    "master": lambda p: optimizers.Master(p),
    "whole tensors": lambda p: optimi.StableAdamW(p, lr=1e-3),
}


def in_later_groups(name, watched):
    model = mlp()
    first, later = list(model[:2].parameters()), list(model[2:].parameters())
    optimizer = LATER[name](first)
    handle = watch(model, optimizer, every=1, sample="all", oracle=True) if watched else None
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": later})
    train(model, optimizer, 3, start=3)
    layers = {} if handle is None else handle.summary()["layers"]
    copied = copy.deepcopy((model, optimizer))
    model.load_state_dict(copied[0].state_dict())
    optimizer.load_state_dict(copied[1].state_dict())
    train(model, optimizer, 2, start=6)
    train(*copied, 2, start=6)
    return handle, layers, [p.detach().clone() for p in (*model.parameters(), *copied[0].parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_later_groups_loaded_states_and_copies_go_on(name):
    handle, layers, with_agent = in_later_groups(name, True)
    _, _, without = in_later_groups(name, False)
    assert handle is not None
    assert layers.keys() == dict(mlp().named_parameters()).keys()
    assert all(values["edq_ratio"] == pytest.approx(1.0, abs=0.05) for values in layers.values())
    assert handle.step == 8
    # torch casts a loaded fp32 master weight to the weight's dtype: from then on the run is plain, and it shows.
    expected = "plain" if name == "master" else "kahan"
    assert handle.info.observed_strategy == expected
    seen = handle.info.fingerprint
    assert seen is not None
    assert any("load_state_dict casts it" in found for found in seen.findings) == (name == "master")
    loaded = handle.summary()["model"]["edq_ratio"]
    assert (loaded == pytest.approx(1.0, abs=0.05)) == (name != "master")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(with_agent, without, strict=True))


@pytest.mark.parametrize("operator_of", [operator.iand, operator.ior, operator.ixor, operator.iadd])
def test_an_operator_in_place_changes_the_bits_that_others_view(operator_of):
    bits = torch.tensor([255, 3], dtype=torch.uint16)
    expected = operator_of(bits.to(torch.int32), 12).to(torch.uint16)
    with UnsignedBits():
        view = operator_of(bits, 12)
    assert view is bits
    assert torch.equal(bits, expected)
