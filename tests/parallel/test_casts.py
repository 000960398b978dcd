"""What reaches copies of the weights is the same however they are spread, or it is not given.

Rows of 64 elements, so that blocks fit.
"""

import math
from typing import Any

import pytest
import torch

from collage_monitor.statistics.casts import FORMATS
from tests.parallel.launch import among_asked, asked, launch
from tests.parallel.measuring import measured, merged_layers
from tests.parallel.models import SPREAD, Exact, Row, adamw, dyadic

pytestmark = pytest.mark.slow

CASTS = (*FORMATS, "bf16>fp8_block128", "bf16>mxfp8")
SHAPES = ((6, 64), (5, 64), (96,), (7, 3), (256, 64), (200, 64))


def wide():
    return Row(Exact(index, dyadic(shape, 300 + index)) for index, shape in enumerate(SHAPES))


OPTIONS: dict[str, Any] = {"steps": 8, "casts": CASTS, "windows": (2,)}


def copies(folder):
    """What this rank saw of each way to spread the model that is asked for."""
    asked = among_asked(SPREAD)
    return {name: measured(*spread(torch.float32, wide()), **OPTIONS) for name, spread in asked.items()}


BY_DAY, AT_NIGHT = ("zero", "fsdp2", "fsdp1 flat"), ("ddp", "fsdp1 original")
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
    return launch("test_casts.copies", 2, tmp_path_factory.mktemp("casts"), ASKED=asked(request, "way"))


@pytest.fixture(scope="module")
def single():
    model = wide()
    return measured(model, adamw(model.parameters()), **OPTIONS)


@pytest.mark.parametrize("way", [*BY_DAY, *(pytest.param(way, marks=pytest.mark.nightly) for way in AT_NIGHT)])
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
