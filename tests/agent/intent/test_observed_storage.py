"""Residuals, master weights and stochastic rounding are found by what they do, whatever they are called, and read
as they are stored; the fingerprint says how all is really kept, and what does not agree with the declared label."""

import copy
import operator
from dataclasses import replace
from functools import partial
from typing import Any

import bitsandbytes
import msgspec
import optimi
import pytest
import pytorch_optimizer
import torch
import torchao.optim
from collage_agent.handle import watch
from collage_agent.intent.observed_storage import observe_storage
from collage_agent.intent.selftest import run_selftest
from collage_agent.intent.weight_bits import UnsignedBits
from collage_agent.sample.remainder_codes import SIGNED_BITS, codes_of
from collage_agent.sample.stored_parts import OURS, PLAIN, Composition, decaying
from collage_optim import CollageAdamW
from collage_optim.numerics.formats import round_to
from torch import nn

from collage_monitor import wire
from tests.agent.intent import optimizers
from tests.agent.training import adamw, gpt_loss, mean_square, mlp, small_gpt, train, watched

BF16, FP16 = torch.bfloat16, torch.float16


def seen(make, dtype=BF16):
    parameters = [nn.Parameter(torch.randn(8, 4).to(dtype)), nn.Parameter(torch.randn(4).to(dtype))]
    optimizer = make(parameters)
    group = optimizer.param_groups[0]
    return observe_storage(optimizer, group, run_selftest(optimizer, group))


ADDED = Composition(residual="kahan_comp")
STORED = {
    "subtracted": (optimizers.Subtracting, Composition(residual="b", sign=-1)),
    "added": (optimizers.Adding, Composition(residual="b")),
    "optimi AdamW": (partial(optimi.AdamW, lr=1e-3, weight_decay=0.1), ADDED),
    "optimi AdamW foreach": (partial(optimi.AdamW, lr=1e-3, foreach=True), ADDED),
    "optimi Ranger, which looks ahead": (partial(optimi.Ranger, lr=1e-3), ADDED),
    "pytorch_optimizer StableAdamW": (partial(pytorch_optimizer.StableAdamW, lr=1e-3), ADDED),
    "momentum": (optimizers.Momentum, PLAIN),
    "AdamW": (partial(torch.optim.AdamW, weight_decay=0.1), PLAIN),
    "AdamW rate 0": (partial(torch.optim.AdamW, lr=0.0), PLAIN),
    "optimi AdamW without": (partial(optimi.AdamW, lr=1e-3, kahan_sum=False), PLAIN),
    "Adafactor": (torch.optim.Adafactor, PLAIN),
    "Lamb": (pytorch_optimizer.Lamb, PLAIN),
}
"""Others of these libraries, and fp32 weights: test_matrix.py."""


@pytest.mark.filterwarnings("ignore:Parameter .foreach. is deprecated:DeprecationWarning")
@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", STORED)
def test_a_residual_is_found_with_its_sign_and_a_moving_average_is_none(name, dtype):
    make, expected = STORED[name]
    found = seen(make, dtype)
    assert (found.composition, found.stochastic, found.failure) == (expected, False, None)


@pytest.mark.parametrize(
    ("make", "composition", "stochastic"),
    [
        (optimizers.Master, Composition(master="b"), False),
        (optimizers.Stochastic, PLAIN, True),
        (torch.optim.LBFGS, PLAIN, None),
    ],
)
def test_masters_and_stochastic_rounding_are_found_and_what_cannot_be_stepped_is_not_known(
    make, composition, stochastic
):
    found = seen(make)
    assert (found.composition, found.stochastic) == (composition, stochastic)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Subtracting", "Adding", "Master"])
def test_stored_and_visible_are_told_apart(name):
    _, _, handle = watched(
        getattr(optimizers, name), small_gpt(), sample="all", oracle=True, steps=5, loss_of=gpt_loss
    )
    values = handle.summary()["model"]
    assert values["edq_ratio"] == pytest.approx(1.0, abs=0.01)
    assert values["edq_oracle_ratio"] == pytest.approx(1.0, abs=0.02)
    assert values["lost_update_ratio"] < 0.1
    assert values["lost_visible_ratio"] > 0.2


LATER: dict[str, Any] = {
    "residual": partial(optimi.AdamW, lr=1e-3),
    "master": optimizers.Master,
    "whole tensors": partial(optimi.StableAdamW, lr=1e-3),
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
    assert layers.keys() == dict(mlp().named_parameters()).keys()
    assert all(values["edq_ratio"] == pytest.approx(1.0, abs=0.05) for values in layers.values())
    assert handle.step == 8
    # torch casts a loaded fp32 master weight to the weight's dtype: from then on the run is plain, and it shows.
    assert handle.info.observed_strategy == ("plain" if name == "master" else "kahan")
    findings = handle.info.fingerprint.findings
    assert any("load_state_dict casts it" in found for found in findings) == (name == "master")
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


def stepped(make=adamw, steps=1, **options):
    return watched(make, steps=steps, **options)[2]


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (optimizers.Subtracting, "kahan", "kahan"),
        (optimizers.Master, "master-weights", "master-weights"),
        (optimizers.Stochastic, "stochastic", "stochastic"),
        (partial(bitsandbytes.optim.AdamW, lr=1e-3), "plain", "fp32-states"),
    ],
)
def test_the_strategy_is_observed_before_the_first_step_and_after_it(make, before, after):
    """Of published ones after it: test_matrix.py."""
    found = [stepped(make, steps).info.observed_strategy for steps in (0, 2)]
    assert found == [before, after]


def test_dtypes_states_and_residuals_are_named():
    seen = stepped(optimizers.Subtracting).info.fingerprint
    elements = sum(p.numel() for p in mlp().parameters())
    assert seen.parameters == seen.gradients == {"bfloat16": elements}
    assert seen.states == {"a": "bfloat16", "b": "bfloat16"}
    assert (seen.residual, seen.residual_sign, seen.master) == ("b", -1, None)
    assert (seen.stochastic_rounding, seen.implementation, seen.findings) == (False, "unknown", [])
    assert stepped(optimizers.Master).info.fingerprint.master == "b"


@pytest.mark.parametrize(
    ("switches", "implementation"),
    [
        ({}, "for-loop"),
        ({"foreach": True}, "foreach"),
        ({"foreach": False}, "for-loop"),
        ({"fused": True}, "fused"),
    ],
)
def test_the_implementation_is_read_from_the_switches(switches, implementation):
    assert stepped(partial(adamw, **switches)).info.fingerprint.implementation == implementation


def test_a_label_that_is_not_what_is_seen_is_a_finding():
    handle = stepped(strategy="kahan")
    assert handle.info.observed_strategy == "plain"
    (found,) = handle.info.fingerprint.findings
    assert "declared kahan" in found
    assert "plain is what is seen" in found
    assert f"finding: {found}" in str(handle)
    right = stepped(partial(optimi.AdamW, lr=1e-3), strategy="kahan")
    assert right.info.fingerprint.findings == []
    assert "finding" not in str(right)


@pytest.mark.slow
def test_quantised_states_are_named_and_read_as_numbers():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).bfloat16()
    model, optimizer, handle = watched(partial(torchao.optim.AdamW8bit, lr=1e-3), layers)
    with torch.compiler.set_stance("force_eager"):
        train(model, optimizer, 3, lambda own, step: mean_square(own, torch.randn(8, 64)))
    seen = handle.info.fingerprint
    assert seen.states["exp_avg"] == "OptimState8bit, quantised and bfloat16"
    assert any("exp_avg is kept in several ways" in found for found in seen.findings)
    assert handle.info.observed_strategy == "plain"
    assert handle.summary()["model"]["edq_ratio"] is not None


def test_an_older_message_without_a_fingerprint_is_understood_and_the_other_way_round():
    info = stepped().info
    sent = msgspec.json.decode(msgspec.json.encode(info))
    assert msgspec.convert(sent, wire.WatchInfo) == info
    del sent["fingerprint"]["unexplained"]
    older = msgspec.convert(sent, wire.WatchInfo).fingerprint
    assert older is not None
    assert older.unexplained is None
    del sent["fingerprint"]
    assert msgspec.convert(sent, wire.WatchInfo).fingerprint is None


PAIRS = 2**20


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sums_of_two_numbers_of_the_dtype_do(dtype):
    """Of all bits, and of a weight with every half of a gap and its neighbours beside it."""
    assert PLAIN.rounds_once(dtype, dtype)
    bits = torch.randint(-(2**15), 2**15, (2, PAIRS), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    first, second = bits.view(dtype).double()
    exponents = torch.frexp(first)[1] - (9 if dtype == BF16 else 12)
    near = torch.ldexp(1 + (bits[1] % 5 - 2) * torch.finfo(dtype).eps, exponents).to(dtype).double()
    for beside in (second, near, -near):
        total = (first + beside)[first.isfinite() & beside.isfinite()]
        assert torch.equal(total.to(dtype).double(), round_to(total, dtype).double())


@pytest.mark.parametrize("integers", [torch.int8, torch.uint8, torch.int16, torch.uint16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_weights_that_integers_lengthen_do_where_it_is_said(dtype, integers):
    weight = torch.linspace(-3.0, 3.0, 257).to(dtype).repeat_interleave(256)
    counts = torch.randint(-(2**15), 2**15, weight.shape, generator=torch.Generator().manual_seed(0))
    kept = counts.to(torch.int16 if integers.itemsize == 2 else torch.int8).view(integers)
    said = []
    for code in codes_of(integers, dtype):
        composition = Composition(residual="low", code=code)
        total = weight.double() + code.residual(weight, kept)
        said.append(composition.rounds_once(dtype, integers))
        assert not said[-1] or torch.equal(total.to(dtype), round_to(total, dtype)), code.words
    assert sum(said) == (2 if dtype == BF16 else 0)


def test_others_are_not_said_to():
    assert OURS.rounds_once(BF16, torch.int16)
    assert OURS.rounds_once(BF16, BF16)
    assert not OURS.rounds_once(BF16, torch.float32)
    assert not Composition(residual="low", sign=-1, code=SIGNED_BITS).rounds_once(BF16, torch.int16)


@pytest.mark.parametrize("integers", [torch.int16, torch.int8])
def test_integers_that_the_optimizer_subtracts_are_read_negated(integers):
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = torch.randint(-100, 100, (64,), generator=torch.Generator().manual_seed(1)).to(integers)
    added = OURS.residual_of(weight, kept)
    assert added.count_nonzero() > 32
    assert torch.equal(replace(OURS, sign=-1).residual_of(weight, kept), -added)


@pytest.mark.parametrize(
    ("strategy", "amsgrad", "judged"),
    [
        ("plain", False, {"exp_avg", "exp_avg_sq"}),
        ("plain", True, {"exp_avg", "exp_avg_sq"}),
        ("split-master", False, {"exp_avg", "exp_avg_sq"}),
        ("split-master-8bit", False, {"exp_avg_sq"}),
        ("coupled-8", False, {"exp_avg_sq"}),
    ],
)
def test_averages_are_judged_by_their_decrements_but_maxima_and_coupled_ones(strategy, amsgrad, judged):
    weight = torch.nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = CollageAdamW([weight], strategy=strategy, amsgrad=amsgrad)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    names = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} & state.keys()
    assert len(names) == 2 + amsgrad
    assert {name for name in names if decaying(state, name)} == judged
