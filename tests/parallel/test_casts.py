"""What reaches copies of the weights is the same however they are spread, or it is not given."""

from __future__ import annotations

import math

import pytest

from tests.parallel.casts import OPTIONS, SHAPES, WAYS, alone
from tests.parallel.launch import asked, launch
from tests.parallel.merged import merged_layers

pytestmark = pytest.mark.slow

BY_DAY = ("zero", "fsdp2", "fsdp1 flat")
TILES = ("fp8_block128", "fp8_block128_ue8m0")
CHANNELS = ("int8_channel", "int4_channel")
BY_ROW = ("mxfp8", "int4_group32", "int4_group128", "uint4_group32", *CHANNELS)


def is_known(way, index, name):
    """Whether what a copy of this parameter depends on is on one rank, and the format fits its shape.

    None: the first FSDP splits a flat parameter anywhere, so a tensor may lie on one rank as a whole.
    """
    last, shape = name.rpartition(">")[2], SHAPES[index]
    if last in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        return True
    if len(shape) < 2 and last in (*TILES, *CHANNELS, "nvfp4_2d", "int4_group128"):
        return False
    if shape[-1] % 16 and last not in ("fp8_tensor", "int8_tensor", *CHANNELS):
        return False
    if way in ("ddp", "zero"):
        return True
    if way == "fsdp2" and len(shape) == 2:
        # Two shards of rows; 128 of them are whole tiles, 100 are not.
        return last in BY_ROW or (last in TILES and shape[0] == 256)
    return None if way.startswith("fsdp1") else False


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    return launch("casts.copies", 2, tmp_path_factory.mktemp("casts"), ASKED=asked(request, "way"))


@pytest.fixture(scope="module")
def single():
    return alone()


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in BY_DAY else pytest.mark.nightly) for way in WAYS]
)
def test_two_processes_count_what_one_does(way, seen, single):
    last = OPTIONS["steps"] - 1
    found, expected = merged_layers([rank[way] for rank in seen], last), merged_layers([single], last)
    for index in range(len(SHAPES)):
        layer = f"parts.{index}.weight"
        for key in (key for key in expected[layer] if key.startswith("cast_")):
            value, known = found[layer][key], is_known(way, index, key.split("/")[1])
            exact = value == pytest.approx(expected[layer][key], rel=1e-12)
            assert exact if known else math.isnan(value) or (exact and known is None), (layer, key)
    if way == "fsdp1 flat":
        whole = [layer for layer in found if found[layer]["cast_elements/nvfp4"] > 0]
        assert whole, "no tensor lies on one rank, beside others in its flat parameter"
    assert 0 < expected["parts.0.weight"]["cast_changed/mxfp8"] < expected["parts.0.weight"]["cast_elements/mxfp8"]
    assert expected["parts.0.weight"]["cast_window_changed/nvfp4/2"] > 0
    assert expected["parts.4.weight"]["cast_route_differing/fp8_block128/bf16>fp8_block128"] > 0
