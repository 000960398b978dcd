"""Low-precision copies against tables of all the numbers of each format, on hard cases and on random ones."""

import numpy as np
import pytest
import torch
from collage_optim.numerics.cast_formats import CAST_FORMATS, coded, route_of
from torch.ao.quantization import PerChannelMinMaxObserver

from collage_monitor.statistics.casts import FORMATS
from tests.reference import casts

ROWS, COLUMNS = 40, 64


def matrices():
    """fp32: random over many scales; exactly between numbers; zeros, large beside small, subnormals."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    yield normal * torch.exp2(torch.randint(-12, 6, (ROWS, 1), generator=generator).float())
    yield (torch.randint(-4096, 4097, (ROWS, COLUMNS), generator=generator) / 256).float()
    hard = normal * 1e-3
    hard[0] = 0
    hard[1, 5] = 448.0
    hard[2, 7] = float(np.nextafter(np.float32(448), np.float32(449)))
    hard[3] *= 2.0**-110
    hard[4, ::3] = 0
    yield hard
    yield torch.zeros(2, COLUMNS)
    for factor in range(3, 40):
        yield normal[:2] * factor
    yield torch.randn(150, 272, generator=generator) * 0.02


def copy_of(matrix, name, dtype=torch.float32):
    """The product's copy of a matrix; a second way, row by row, finds the largest weight of each tile."""
    route = route_of(name)
    kind, tile = route.last, None
    if kind.by_channel:
        tile = matrix.abs().amax(1, keepdim=True).double().expand(matrix.shape)
    elif kind.tile:
        high, wide = kind.tile
        tile = torch.empty(len(matrix), matrix.shape[1] // kind.block, dtype=torch.float64)
        for row, runs in enumerate(tile):
            for run in range(len(runs)):
                top, left = row // high * high, run * kind.block // wide * wide
                runs[run] = matrix[top : top + high, left : left + wide].abs().max()
    tensor = matrix.abs().max().double().expand(matrix.numel() // max(kind.block, 16)) if kind.of_tensor else None
    return coded(matrix.reshape(-1).to(dtype), route, tensor=tensor, tile=tile)


OVER_BF16 = ("fp8_tensor", "fp8_block128", "mxfp8", "nvfp4_2d", "uint4_group32")
ROUTES = (*FORMATS, "fp16>bf16", *(f"bf16>{name}" for name in OVER_BF16))


def test_the_agent_and_the_contract_name_the_same_formats():
    assert tuple(CAST_FORMATS) == tuple(FORMATS) == casts.FORMATS


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_copies_are_the_nearest_numbers(name, dtype):
    for matrix in matrices():
        if matrix.shape[1] % route_of(name).last.block:
            continue
        found = copy_of(matrix, name, dtype)
        numbers, _, _ = casts.parts_of(matrix.numpy(), name)
        np.testing.assert_array_equal(found.numbers.double().numpy(), numbers.reshape(-1))
        wanted = casts.copy_of(matrix.numpy(), name).reshape(-1)
        np.testing.assert_array_equal(found.values().double().numpy(), wanted)


@pytest.mark.parametrize("name", [name for name in casts.ELEMENTS if name in casts.TILE])
def test_every_code_and_all_that_lies_between_two_is_found(name):
    """A scale of 1 throughout: each number of the format, the middle to the next, and their neighbours in fp32."""
    grid = casts.numbers(name).astype(np.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(part, np.float32(limit)) for part in (grid, middle) for limit in (0, np.inf)]
    wanted = np.unique(np.minimum(np.concatenate([grid, middle, *near]), grid[-1]))
    wanted = np.concatenate([wanted, -wanted])
    rows = np.zeros((128 * -(-len(wanted) // (15 * 8)), 128), dtype=np.float32)
    # One number in sixteen is the largest of the format, which makes the scale of its run 1.
    rows[:, ::16] = grid[-1]
    places = np.flatnonzero(rows.reshape(-1) == 0)[: len(wanted)]
    rows.reshape(-1)[places] = wanted
    if name.startswith("nvfp4"):
        rows[-1, 0] = 2688
    found = copy_of(torch.from_numpy(rows), name).values().double().numpy()
    np.testing.assert_array_equal(found[places], casts.nearest(wanted, name))
    assert set(np.abs(found[places])) == set(casts.numbers(name))


@pytest.mark.parametrize("name", casts.INTEGERS)
def test_integers_are_those_that_torch_quantises_to_in_training(name):
    """Scale and zero point of each channel or group by torch's observer, values by its FakeQuantize."""
    low, high = casts.INTEGERS[name]
    scheme = torch.per_channel_affine if low == 0 else torch.per_channel_symmetric
    kind = torch.quint8 if low == 0 else torch.qint8
    for matrix in matrices():
        if "group" in name and matrix.shape[1] % 32:
            continue
        # A row of 64 is one group of 128, which ends there.
        width = matrix.numel() if name == "int8_tensor" else 32 if name.endswith("group32") else matrix.shape[1]
        rows = matrix.reshape(-1, width)
        observer = PerChannelMinMaxObserver(
            dtype=kind, qscheme=scheme, quant_min=low, quant_max=high, eps=torch.finfo(torch.float32).tiny
        )
        observer(rows)
        scale, zero_point = observer.calculate_qparams()
        wanted = torch.fake_quantize_per_channel_affine(rows, scale, zero_point.int(), 0, low, high)
        found = copy_of(matrix, name)
        assert found.scales is not None
        assert torch.equal(found.scales.unique(), scale.double().unique())
        assert torch.equal(found.values().float(), wanted.reshape(-1))
        assert found.numbers.amin() >= low
        assert found.numbers.amax() <= high


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "fp8_block128_ue8m0", "bf16>mxfp8"])
def test_a_sum_of_two_numbers_is_rounded_once(name):
    generator = torch.Generator().manual_seed(4)
    high = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16).double()
    values = high + high * torch.randn(ROWS, COLUMNS, generator=generator).double() * 2.0**-26
    found = copy_of(values, name, torch.float64).values().double().numpy()
    np.testing.assert_array_equal(found, casts.copy_of(values.numpy(), name).reshape(-1))


FIELD = {
    "bf16": (0.028, 0.1715, 0.0),
    "fp8_tensor": (0.00257, 0.01882, 0.0213),
    "fp8_block128": (0.00259, 0.01887, 0.0221),
    "mxfp8": (0.00263, 0.01865, 0.0343),
    "nvfp4": (0.00020, 0.00171, 0.0071),
    "nvfp4_2d": (0.00015, 0.00135, 0.0060),
}
"""Codes changed by an update of size ≤ 1e-6 and ≤ 1e-5, and those that differ by the route over bf16."""


@pytest.mark.nightly
def test_the_shares_of_codes_of_normal_weights_are_those_of_the_field():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1024, 1024, generator=generator) * 0.02
    for column, rate in enumerate((1e-6, 1e-5)):
        stepped = weights - rate * torch.randn(1024, 1024, generator=generator).clamp(-1, 1)
        for name, shares in FIELD.items():
            now, then = copy_of(stepped, name).numbers, copy_of(weights, name).numbers
            assert float((now != then).double().mean()) == pytest.approx(shares[column], rel=0.05), name
    for name, (_, _, share) in FIELD.items():
        route = name if name == "bf16" else f"bf16>{name}"
        differing = copy_of(weights, name).numbers != copy_of(weights, route).numbers
        assert float(differing.double().mean()) == pytest.approx(share, rel=0.05), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_value_that_is_not_finite_spoils_what_shares_its_scale_alone(name, bad):
    kind = CAST_FORMATS[name]
    values = torch.linspace(-1, 1, 32 * 272).reshape(32, 272)
    values[20, 40] = bad
    finite = copy_of(values, name).values().double().isfinite().reshape(values.shape)
    expected = torch.ones_like(finite)
    high, wide = casts.TILE.get(name, (1, 1)) or values.shape
    # The largest weight of a tensor with such a value is not finite either: then nothing of its copy is known.
    high, wide = values.shape if kind.of_tensor else (high, wide)
    top, left = 20 // high * high, 40 // wide * wide
    expected[top : top + high, left : left + wide] = False
    assert torch.equal(finite, expected)
