"""One, two and four processes measure the same thing, however the model is spread over them."""

import math
from functools import cache

import pytest
import torch
from torch import distributed

from tests.parallel.launch import among_asked, asked, launch
from tests.parallel.measuring import STEPS, alone, assert_equal_totals, measured
from tests.parallel.models import MIXED, SHAPES, SPREAD

pytestmark = pytest.mark.slow

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def totals(folder):
    """Every way to spread the model, whole tensors, in bfloat16 and in what other dtypes are asked for."""
    seen = {}
    for dtype_name, dtype in ({"bfloat16": torch.bfloat16} | among_asked(DTYPES)).items():
        for name, spread in SPREAD.items():
            if name == "fsdp2 hybrid" and distributed.get_world_size() < 4:
                continue
            seen[name, dtype_name] = measured(*spread(dtype))
    for name, spread in MIXED.items():
        seen[f"mixed {name}", "float32"] = measured(*spread(torch.float32))
    return seen


@pytest.fixture(scope="module")
def alone_by_dtype():
    return {name: alone(dtype) for name, dtype in DTYPES.items()}


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    folder, dtypes = tmp_path_factory.mktemp("totals"), asked(request, "dtype")
    return cache(lambda count: launch("test_totals.totals", count, folder, ASKED=dtypes))


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", SPREAD)
def test_totals_do_not_depend_on_how_the_model_is_spread(name, dtype, processes, seen, alone_by_dtype):
    if name == "fsdp2 hybrid" and processes == 2:
        processes = 4
    assert_equal_totals([rank[name, dtype] for rank in seen(processes)], alone_by_dtype[dtype], STEPS)


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_steps_full_shards_and_says_so(name, seen, alone_by_dtype):
    ranks = [rank[f"mixed {name}", "float32"] for rank in seen(4)]
    assert_equal_totals(ranks, alone_by_dtype["float32"], STEPS)
    for rank in ranks:
        assert rank["info"].dtype == "float32"
        assert "cast to bfloat16 for the forward pass" in rank["info"].intent_reason


@pytest.mark.parametrize("name", SPREAD)
def test_every_rank_announces_shards_of_whole_tensors(name, seen):
    ranks = [rank[name, "bfloat16"] for rank in seen(4)]
    announced: dict[str, dict[int, int]] = {}
    for rank in ranks:
        for layer in rank["layers"][-1]:
            index, own = int(layer.name.split(".")[1]), layer.name.split(".")[2]
            assert tuple(layer.shape) == (SHAPES[index] if own == "weight" else (index + 1,))
            assert layer.module_type == "Part"
            replicas = announced.setdefault(layer.name, {})
            replicas[layer.replica] = replicas.get(layer.replica, 0) + layer.elements
    expected = {"ddp": 4, "fsdp1 unsharded": 4, "fsdp2 hybrid": 2}.get(name, 1)
    for layer_name, replicas in announced.items():
        index, own = int(layer_name.split(".")[1]), layer_name.split(".")[2]
        elements = math.prod(SHAPES[index]) if own == "weight" else index + 1
        assert replicas == dict.fromkeys(range(expected), elements), layer_name
    assert len(announced) == 2 * len(SHAPES)


@pytest.mark.parametrize("name", SPREAD)
def test_uneven_and_empty_shards_are_measured_as_far_as_they_go(name, seen):
    for rank in seen(4):
        told = rank[name, "bfloat16"]
        assert told["info"].intent == "shadow"
        assert told["text"]
        for layer in told["layers"][-1]:
            assert (told["summary"]["layers"][layer.name].get("grad_norm") is None) == (layer.elements == 0)
