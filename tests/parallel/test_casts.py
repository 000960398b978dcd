"""What reaches copies of the weights is the same however they are spread, or it is not given."""

from __future__ import annotations

import math

import pytest

from collage_monitor.statistics.casts import FORMATS
from tests.parallel.casts import OPTIONS, SHAPES, WAYS, alone
from tests.parallel.launch import launch
from tests.parallel.merged import merged_layers

ROWS_WHOLE = {"ddp": (0, 1, 2), "zero": (0, 1, 2), "fsdp2": (0, 1), "fsdp1 original": ()}
"""The parameters whose blocks of 32 are known: their last dimension holds whole blocks, all on one rank."""
REPLICATED = ("ddp", "zero")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return launch("casts.copies", 2, tmp_path_factory.mktemp("casts"))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_count_what_one_does(way, seen):
    last = OPTIONS["steps"] - 1
    found, expected = merged_layers([rank[way] for rank in seen], last), merged_layers([alone()], last)
    for index in range(len(SHAPES)):
        layer = f"parts.{index}.weight"
        for name in FORMATS:
            known = name not in ("mxfp8", "nvfp4") or (
                index in ROWS_WHOLE[way] and (name == "mxfp8" or way in REPLICATED)
            )
            for key in (key for key in expected[layer] if key.startswith("cast_") and key.split("/")[1] == name):
                value = found[layer][key]
                assert math.isnan(value) if not known else value == pytest.approx(expected[layer][key], rel=1e-12)
                assert not known or not math.isnan(value), (layer, key)
    assert 0 < expected["parts.0.weight"]["cast_changed/mxfp8"] < expected["parts.0.weight"]["cast_elements/mxfp8"]
    assert expected["parts.0.weight"]["cast_window_changed/nvfp4/2"] > 0
