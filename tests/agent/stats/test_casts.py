"""Copies of weights in real runs against counts by hand, over steps and windows, whole and sampled."""

import collections
import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor.statistics.casts import FORMATS
from tests.agent.step.test_measurer import totals_of
from tests.agent.step.test_windows import CYCLE, reference_update
from tests.agent.training import adamw, watched
from tests.reference import casts, diagnostics

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1}
WAYS = {
    "fp32": (torch.float32, partial(adamw, **OPTIONS)),
    "pairs": (torch.bfloat16, partial(CollageAdamW, **OPTIONS, strategy="light")),
    "master": (torch.bfloat16, partial(CollageAdamW, **OPTIONS, strategy="master-weights")),
    "counts": (torch.bfloat16, partial(CollageAdamW, **OPTIONS, strategy="split-master")),
}
CASTS = (*FORMATS, "bf16>fp8_tensor", "bf16>fp8_block128", "bf16>mxfp8", "bf16>nvfp4_2d")
_TILES = ("0.weight", "2.weight")
_BY_32 = ("mxfp8", "int4_group32", "uint4_group32")
_CHANNELS = (*_TILES, "4.weight")
KNOWN = {
    "mxfp8": ("0.weight", "0.bias"),
    "nvfp4": ("0.weight", "0.bias", "2.weight"),
    "nvfp4_2d": _TILES,
    "fp8_block128": _TILES,
    "fp8_block128_ue8m0": _TILES,
    "int8_channel": _CHANNELS,
    "int4_channel": _CHANNELS,
    "int4_group32": ("0.weight", "0.bias"),
    "int4_group128": _TILES,
    "uint4_group32": ("0.weight", "0.bias"),
}
"""The tensors whose last dimension holds whole blocks, in two dimensions for tiles; other formats know all."""
STEPS = 4


def by_day(*ways):
    return [pytest.param(way, marks=[pytest.mark.nightly] * (way not in ways)) for way in WAYS]


def model_of(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 3)).to(dtype)


def gradients(model, step):
    """Random ones: what the weights compute is of no matter here."""
    generator = torch.Generator().manual_seed(500 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def known(layer, name):
    return layer in KNOWN.get(name.rpartition(">")[2], (layer,))


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
    model, optimizer, handle = watched(make, model_of(dtype), casts=CASTS, **options)
    ends, updates = collections.defaultdict(list), collections.defaultdict(list)
    for step in range(steps + 1):
        gradients(model, step)
        for name, parameter in model.named_parameters():
            ends[name].append(stored(optimizer, parameter))
            updates[name].append(intended(optimizer, parameter))
        if step < steps:
            optimizer.step()
    return handle, ends, {name: found[:steps] for name, found in updates.items()}


def check(totals, expected, key, way):
    name, label = key
    last = label.split("/")[0].rpartition(">")[2]
    shared = ("recoded", "rescaled") if casts.BYTES[last][1] else ("recoded",)
    parts = shared if last in casts.TILE else ()
    for part in ("elements", "changed", *parts):
        assert totals[f"{name}_{part}/{label}"] == expected[part], (name, part, label)
    # The states of "counts" are no floats, and the reference's u is made of floats.
    for part in ("squared_sum", "effective_sum") if way != "counts" else ():
        assert totals[f"{name}_{part}/{label}"] == pytest.approx(expected[part], rel=1e-6), (part, label)


@pytest.mark.parametrize("way", by_day("fp32", "counts"))
def test_a_step_of_whole_tensors_equals_a_count_by_hand(way):
    handle, ends, updates = watched_steps(way, STEPS, sample="all")
    for layer, totals in totals_of(handle).items():
        for name in CASTS:
            if not known(layer, name):
                assert math.isnan(totals[f"cast_elements/{name}"])
                continue
            before, after = ends[layer][-2:]
            check(totals, casts.sums(before, after, updates[layer][-1], name), ("cast", name), way)
            one, other = name.rpartition(">")[2], name
            if one != other:
                last = ends[layer][-1]
                numbers = [casts.parts_of(last, route)[0] for route in (one, other)]
                assert totals[f"cast_route_differing/{one}/{other}"] == (numbers[0] != numbers[1]).sum()
                assert totals[f"cast_route_elements/{one}/{other}"] == last.size
    model = handle.summary()["model"]
    assert 0 < model["cast_changed_ratio/fp8_e4m3"] < 1
    assert 0 < model["cast_route_ratio/mxfp8/bf16>mxfp8"] < 0.1
    # A tensor's scale follows its largest weight: the copy moves where hardly a code does.
    assert model["cast_recoded_ratio/nvfp4"] < 0.2 < 0.9 < model["cast_changed_ratio/nvfp4"]


@pytest.mark.parametrize("way", by_day("pairs"))
def test_windows_of_whole_tensors_equal_a_count_by_hand(way):
    handle, ends, updates = watched_steps(way, CYCLE, sample="all", windows=(2, 4))
    for layer, totals in totals_of(handle).items():
        for name in CASTS:
            if not known(layer, name):
                continue
            for length in (2, 4):
                together = [sum(steps, Fraction(0)) for steps in zip(*updates[layer][-length:], strict=True)]
                before, after = ends[layer][-1 - length], ends[layer][-1]
                check(totals, casts.sums(before, after, together, name), ("cast_window", f"{name}/{length}"), way)
    model = handle.summary()["model"]
    assert model["cast_changed_window_ratio/bf16/4"] > model["cast_changed_ratio/bf16"] > 0


@pytest.mark.drawn
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("shape", [(256, 64), (200, 144), (3, 70, 48)], ids=str)
def test_a_sample_counts_whole_blocks_of_the_formats(name, shape):
    """The sample's own copies, with scales that depend on weights outside it: tiles over three matrices, edges."""
    torch.manual_seed(1)
    model, values = nn.Module(), torch.randn(shape) * torch.randn(shape[:-1]).exp().unsqueeze(-1)
    weight = nn.Parameter(values)
    model.register_parameter("weight", weight)
    _, optimizer, handle = watched(model=model, sample=1024, casts=(name,))
    gradients(model, 0)

    def copies():
        matrices = weight.detach().numpy().reshape(-1, *shape[-2:])
        if last.endswith("channel"):
            matrices = matrices.reshape(1, shape[0], -1)
        largest = float(np.abs(matrices).max())
        return np.concatenate([casts.copy_of(rows, name, largest) for rows in matrices])

    last = name.rpartition(">")[2]
    before = copies() if last not in _BY_32 or shape[-1] % 32 == 0 else None
    optimizer.step()
    (sample,) = handle._hooks[0].measurer._buckets[0].samples
    totals, elements = totals_of(handle)["weight"], weight.numel()
    if before is None:
        assert math.isnan(totals[f"cast_elements/{name}"])
        return
    places = sample.rows[:, None] * sample.block + np.arange(sample.block)
    seen = (copies() != before).reshape(-1)[places].sum()
    assert sample.block == (32 if last in _BY_32 else 16)
    assert totals[f"cast_changed/{name}"] == pytest.approx(seen * (elements / 1024), rel=1e-12)
    assert totals[f"cast_elements/{name}"] == elements


def test_a_sync_is_forecast_in_the_bytes_that_a_count_by_hand_finds():
    torch.manual_seed(2)
    layer = nn.Linear(128, 128, bias=False)
    model, optimizer, handle = watched(partial(adamw, lr=1e-5), layer, sample="all", casts=CASTS, windows=(2,))
    ends = []
    for step in range(8):
        gradients(model, step)
        ends.append(model.weight.detach().numpy().copy())
        optimizer.step()
    found, last = handle.summary()["model"], model.weight.detach().numpy()
    for name in CASTS:
        for before, kind, label in ((ends[-1], "sync", name), (ends[-2], "sync_window", f"{name}/2")):
            sent, dense = casts.sync_bytes(before, last, name)
            assert found[f"cast_{kind}_bytes/{label}"] == pytest.approx(sent, rel=1e-9), label
            assert found[f"cast_{kind}_ratio/{label}"] == pytest.approx(sent / dense, rel=1e-9), label


def test_weights_as_narrow_as_the_copy_have_none():
    model, optimizer, handle = watched(model=model_of(torch.bfloat16), casts=("bf16", "fp8_e4m3"))
    gradients(model, 0)
    optimizer.step()
    values = handle.summary()["model"]
    assert "cast_changed_ratio/bf16" not in values
    assert 0 < values["cast_changed_ratio/fp8_e4m3"] < 1


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_2d", "fp8_block128", "int8_channel", "uint4_group32"])
def test_a_number_beside_the_layers_has_no_copy_in_blocks(name):
    model = nn.Linear(64, 32)
    model.scale = nn.Parameter(torch.tensor(2.0))
    _, optimizer, handle = watched(model=model, sample="all", casts=(name,))
    gradients(model, 0)
    optimizer.step()
    layers = handle.summary()["layers"]
    assert layers["weight"][f"cast_changed_ratio/{name}"] > 0
    assert layers["scale"][f"cast_changed_ratio/{name}"] is None
    assert layers["scale"]["edq_ratio"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("columns", [32, 33])
@pytest.mark.parametrize("bad", [0, 5])
def test_an_element_whose_copy_overflows_is_left_out(columns, bad):
    """33 columns end with empty slots, and `bad` elements have no finite gradient."""
    model = nn.Linear(columns, 2, bias=False)
    with torch.no_grad():
        model.weight[0, 3] = 1e6
    names = ("fp16", "fp8_e5m2", "fp16>fp8_e5m2")
    _, optimizer, handle = watched(partial(torch.optim.SGD, lr=1.0), model, sample="all", casts=names)
    gradients(model, 0)
    gradient = model.weight.grad
    assert gradient is not None
    gradient[1, :bad] = torch.nan
    update, before = -gradient.double().numpy(), model.weight.detach().double().numpy()
    optimizer.step()
    after = model.weight.detach().double().numpy()
    taken = np.isfinite(update) & (before < 1e6)
    totals, copies = totals_of(handle)["weight"], {}
    for name in names:
        kept = np.isfinite(update) if name == "fp8_e5m2" else taken
        (now, then), u = (casts.copy_of(np.where(kept, w, 0.0), name) for w in (after, before)), update[kept]
        copies[name], moved = now[taken], (now - then)[kept]
        assert totals[f"cast_elements/{name}"] == kept.sum(), name
        assert totals[f"cast_changed/{name}"] == np.count_nonzero(moved), name
        assert totals[f"cast_effective_sum/{name}"] == pytest.approx(u @ moved, rel=1e-12), name
        assert totals[f"cast_squared_sum/{name}"] == pytest.approx(u @ u, rel=1e-12), name
    assert totals["cast_route_elements/fp8_e5m2/fp16>fp8_e5m2"] == taken.sum()
    differing = np.count_nonzero(copies["fp8_e5m2"] != copies["fp16>fp8_e5m2"])
    assert totals["cast_route_differing/fp8_e5m2/fp16>fp8_e5m2"] == differing


@pytest.mark.parametrize(
    "casts_asked", [("bfloat16",), ("bf16", "bf16"), "bf16", ("mxfp8>bf16",), ("bf16>",), ("bf16>bf16",)]
)
def test_a_format_that_is_not_known_is_refused_by_name(casts_asked):
    with pytest.raises(ValueError, match=r"casts=.*pass different ones of bf16, fp16, fp8_e4m3"):
        watched(casts=casts_asked)
