"""Copies of weights in real runs against counts by hand, over steps and windows, whole and sampled."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from collage_agent.handle import watch
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor.statistics.casts import FORMATS
from tests.agent.step.test_measurer import totals_of
from tests.agent.step.test_windows import CYCLE, reference_update
from tests.reference import casts, diagnostics

pytestmark = pytest.mark.slow

WAYS = {
    "fp32": (torch.float32, lambda p: torch.optim.AdamW(p, lr=3e-4, weight_decay=0.1)),
    "pairs": (torch.bfloat16, lambda p: CollageAdamW(p, lr=3e-4, weight_decay=0.1, strategy="light")),
    "master": (torch.bfloat16, lambda p: CollageAdamW(p, lr=3e-4, weight_decay=0.1, strategy="master-weights")),
}
KNOWN = {"mxfp8": ("0.weight", "0.bias"), "nvfp4": ("0.weight", "0.bias", "2.weight")}
"""The tensors whose last dimension holds whole blocks; other formats know all."""
STEPS = 4


def model_of(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 3)).to(dtype)


def gradients(model, step):
    """Random ones: what the weights compute is of no matter here."""
    generator = torch.Generator().manual_seed(500 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def stored(optimizer, parameter):
    kept = optimizer.stored_parameter(parameter) if isinstance(optimizer, CollageAdamW) else parameter
    return kept.detach().double().reshape(-1, parameter.shape[-1]).numpy().copy()


def intended(optimizer, parameter):
    if not optimizer.state:
        return None
    return diagnostics.exact(reference_update(optimizer)[id(parameter)])


def watched_steps(way, steps, **options):
    """(handle, names, [θ before each step and after the last], [u of each step]) of a run, all by layer."""
    dtype, make = WAYS[way]
    model = model_of(dtype)
    optimizer = make(model.parameters())
    handle = watch(model, optimizer, every=1, budget=None, casts=FORMATS, **options)
    named = dict(model.named_parameters())
    ends: dict[str, list] = {name: [] for name in named}
    updates: dict[str, list] = {name: [] for name in named}
    for step in range(steps):
        gradients(model, step)
        for name, parameter in named.items():
            ends[name].append(stored(optimizer, parameter))
            updates[name].append(intended(optimizer, parameter))
        optimizer.step()
    for name, parameter in named.items():
        ends[name].append(stored(optimizer, parameter))
    return handle, ends, updates


def check(totals, expected, key):
    name, label = key
    for part in ("elements", "changed", *(("recoded",) if label.split("/")[0] in casts.BLOCK else ())):
        assert totals[f"{name}_{part}/{label}"] == expected[part], (name, part, label)
    for part in ("squared_sum", "effective_sum"):
        assert totals[f"{name}_{part}/{label}"] == pytest.approx(expected[part], rel=1e-6), (part, label)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_whole_tensors_equals_a_count_by_hand(way):
    handle, ends, updates = watched_steps(way, STEPS, sample="all")
    for layer, totals in totals_of(handle).items():
        for name in FORMATS:
            if layer not in KNOWN.get(name, (layer,)):
                assert math.isnan(totals[f"cast_elements/{name}"])
                continue
            before, after = ends[layer][-2:]
            check(totals, casts.sums(before, after, updates[layer][-1], name), ("cast", name))
    model = handle.summary()["model"]
    assert 0 < model["cast_changed_ratio/fp8_e4m3"] < 1
    # A tensor's scale follows its largest weight: the copy moves where hardly a code does.
    assert model["cast_recoded_ratio/nvfp4"] < 0.2 < 0.9 < model["cast_changed_ratio/nvfp4"]


@pytest.mark.parametrize("way", WAYS)
def test_windows_of_whole_tensors_equal_a_count_by_hand(way):
    handle, ends, updates = watched_steps(way, CYCLE, sample="all", windows=(2, 4))
    for layer, totals in totals_of(handle).items():
        for name in FORMATS:
            if layer not in KNOWN.get(name, (layer,)):
                continue
            for length in (2, 4):
                together = [sum(steps, Fraction(0)) for steps in zip(*updates[layer][-length:], strict=True)]
                before, after = ends[layer][-1 - length], ends[layer][-1]
                check(totals, casts.sums(before, after, together, name), ("cast_window", f"{name}/{length}"))
    model = handle.summary()["model"]
    assert model["cast_changed_window_ratio/bf16/4"] > model["cast_changed_ratio/bf16"] > 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_counts_whole_blocks_of_the_formats(name):
    torch.manual_seed(1)
    model = nn.Linear(64, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1, sample=1024, budget=None, casts=FORMATS)
    gradients(model, 0)
    before = model.weight.detach().numpy().copy()
    optimizer.step()
    (sample,) = handle._hooks[0].measurer._buckets[0].samples
    assert sample.block == 32
    changed = casts.copy_of(model.weight.detach().numpy(), name) != casts.copy_of(before, name)
    seen = changed.reshape(-1, 32)[sample.rows].sum()
    totals = totals_of(handle)["weight"]
    assert totals[f"cast_changed/{name}"] == seen * (16_384 / 1024)
    assert totals[f"cast_elements/{name}"] == 16_384


def test_fp32_weights_at_a_low_rate_whose_copies_hardly_move_read_so():
    torch.manual_seed(2)
    model = nn.Linear(256, 256, bias=False)
    nn.init.normal_(model.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    handle = watch(model, optimizer, every=1, sample="all")
    before = model.weight.detach().clone()
    for step in range(2):
        before = model.weight.detach().clone()
        gradients(model, step)
        optimizer.step()
    moved = (model.weight.to(torch.bfloat16) != before.to(torch.bfloat16)).double().mean()
    values = handle.summary()["model"]
    assert 0.03 < moved < 0.08
    assert values["cast_changed_ratio/bf16"] == moved
    assert values["edq_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert values["lost_update_ratio"] < 1e-3
    assert values["cast_edq_ratio/bf16"] == pytest.approx(1.0, abs=0.1)


def test_weights_as_narrow_as_the_copy_have_none():
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1, casts=("bf16", "fp8_e4m3"))
    gradients(model, 0)
    optimizer.step()
    values = handle.summary()["model"]
    assert "cast_changed_ratio/bf16" not in values
    assert 0 < values["cast_changed_ratio/fp8_e4m3"] < 1


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_number_beside_the_layers_has_no_copy_in_blocks(name):
    model = nn.Linear(64, 32)
    model.scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1, sample="all", casts=(name,))
    gradients(model, 0)
    optimizer.step()
    layers = handle.summary()["layers"]
    assert layers["weight"][f"cast_changed_ratio/{name}"] > 0
    assert layers["scale"][f"cast_changed_ratio/{name}"] is None
    assert layers["scale"]["edq_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_an_element_whose_copy_overflows_is_left_out():
    model = nn.Linear(32, 2, bias=False)
    with torch.no_grad():
        model.weight[0, 3] = 1e6
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = watch(model, optimizer, every=1, sample="all", casts=("fp16", "fp8_e5m2"))
    gradients(model, 0)
    optimizer.step()
    totals = totals_of(handle)["weight"]
    assert totals["cast_elements/fp16"] == 63
    assert totals["cast_elements/fp8_e5m2"] == 64
    assert np.isfinite(totals["cast_effective_sum/fp16"])


@pytest.mark.parametrize("casts_asked", [("bfloat16",), ("bf16", "bf16"), "bf16"])
def test_a_format_that_is_not_known_is_refused_by_name(casts_asked):
    model = model_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"casts=.*pass different ones of bf16, fp16, fp8_e4m3"):
        watch(model, optimizer, casts=casts_asked)
