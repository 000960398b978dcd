"""What kernels are on devices of several generations, read from their code: nothing of it is run."""

import json
import re
from functools import cache

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW
from collage_optim.blocks import BLOCK_ELEMENTS

from tests.optim.models import walk
from tests.optim.triton_apart import only_where_published, run_with_triton

pytestmark = [pytest.mark.slow, only_where_published]

BY_DAY = ("split-master",)
REGISTERS = 168
"""At most: with more, fewer than twelve warps share a multiprocessor."""


def bytes_kept(strategy):
    """Bytes of each element that a step reads and writes, beside those of its blocks' scales, and of the narrowest
    tensor."""
    weight = torch.nn.Parameter(torch.ones(BLOCK_ELEMENTS, dtype=torch.bfloat16))
    optimizer = CollageAdamW([weight], strategy=strategy, seed=1)
    walk(optimizer, 1.0)
    states = {name: own.element_size() for name, own in optimizer.state[weight].items() if name != "step"}
    kept = sum(size for name, size in states.items() if not name.endswith("_scale"))
    # A master weight is the weight: the rounded one is written only.
    read = kept + (0 if strategy == "master-weights" else weight.element_size())
    return read + weight.element_size(), kept + weight.element_size(), min(states.values())


@cache
def kernels(target, *specs):
    """What each kernel of AdamW is, by its strategy and form."""
    lines = run_with_triton("tests.optim.triton_code", target, "AdamW", *specs).splitlines()
    return dict(zip(specs, map(json.loads, lines), strict=True))


def kernels_of(strategy):
    """As a step is launched, and of a measured step with and without its totals."""
    return kernels("sm_90", strategy, f"{strategy}+step", f"{strategy}+totals")


@pytest.mark.parametrize(
    ("target", "strategy"),
    [
        pytest.param(target, name, marks=[] if target == "sm_90" and name in BY_DAY else pytest.mark.nightly)
        for target in ("sm_80", "sm_90", "sm_100")
        for name in STRATEGIES
    ],
)
def test_each_component_is_moved_once_in_vectors_and_rounded_as_in_eager_steps(target, strategy):
    kernel = (kernels_of(strategy) if target == "sm_90" else kernels(target, strategy))[strategy]
    read, written, narrowest = bytes_kept(strategy)
    assert (kernel["loaded_bytes"], kernel["stored_bytes"]) == (read, written)
    # Eight elements a thread: one of 16 bits is moved by 128 bits at a time, of fp32 twice, of a byte by 64 bits.
    assert kernel["narrowest_bytes"] == (8 if narrowest == 1 else 16)
    assert kernel["spilt_bytes"] == 0
    assert kernel["registers"] <= REGISTERS
    assert kernel["machine_code_bytes"] > 0
    ptx = kernel["assembly"]
    assert f".target {target}" in ptx
    assert re.search(r"div\.rn\.f32", ptx), "quotients are rounded to nearest"
    assert re.search(r"sqrt\.rn\.f32", ptx), "and roots"
    assert not re.search(r"\.approx|\.full|\.ftz|fma\.", ptx), "nothing is approximated, flushed to zero, or fused"


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in STRATEGIES]
)
def test_totals_cost_a_kernel_no_load_of_elements_and_a_store_for_each_sum(strategy):
    """A measured step reads and writes what a step does, and beside it a row of sums for 1,024 elements.

    One weight is read besides where a step only writes it, because it is its master rounded. What coupled rounding
    alone needs is not read in double precision.
    """
    _, step, totals = kernels_of(strategy).values()
    visible = strategy == "master-weights"
    assert step["loads"] + visible < totals["loads"] <= step["loads"] + visible + totals["numbers"]
    assert totals["stores"] == step["stores"] + totals["sums"]
    assert 28 <= totals["sums"] <= 32
    assert totals["spilt_bytes"] == 0
    assert not re.search(r"\.approx|\.full|\.ftz|fma\.", totals["assembly"])


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["AdamW", "Lion", "SGD"])
def test_a_device_of_another_maker_is_compiled_for_too(rule):
    strategies = [name for name in STRATEGIES if rule == "AdamW" or name in ("plain", "light", "split-master")]
    for line in run_with_triton("tests.optim.triton_code", "gfx942", rule, *strategies).splitlines():
        kernel = json.loads(line)
        assert kernel["spilt_bytes"] == 0
        assert kernel["registers"] <= REGISTERS
