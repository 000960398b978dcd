"""The written-down cases: 45 vectors of transformations and expansions, splits, edges, and one defect."""

import json
from pathlib import Path

import pytest
import torch
from collage_optim import numerics
from collage_optim.numerics.expansions import split_scalar

from tests.numerics.bits import from_bits, to_hexadecimal
from tests.reference.expansions import LAYOUTS, OPERATIONS

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text(encoding="utf-8"))

SPLITS = {
    "3f800001": "3f80 3400",
    "3f808000": "3f80 3b80",
    "3f818000": "3f82 bb80",
    "3f80ffff": "3f81 b400",
    "42ce802c": "42cf be80",
    "7f7f7fff": "7f7f 7b00",
    "7f7f8000": "7f80 ff80",
    "00800001": "0080 0000",
    "05000100": "0500 0002",
}

BETA2_PAIRS = {
    0.9: "3f66 3acd",
    0.95: "3f73 3a4d",
    0.98: "3f7b b9f6",
    0.99: "3f7d 3ae1",
    0.995: "3f7f ba8f",
    0.999: "3f80 ba83",
    0.9999: "3f80 b8d2",
    1 - 2**-17: "3f80 b700",
}


def test_there_are_45_vectors():
    assert len(VECTORS) == 45


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['operation']}-{vector['note']}")
def test_vector(vector):
    operands = [from_bits([pattern], getattr(torch, vector["dtype"])) for pattern in vector["inputs"]]
    assert to_hexadecimal(*getattr(numerics, vector["operation"])(*operands)) == vector["outputs"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['operation']}-{vector['note']}")
def test_vector_against_exact_rationals(vector):
    layout = LAYOUTS[vector["dtype"]]
    operands = [layout.decode(int(pattern, 16)) for pattern in vector["inputs"]]
    outputs = [layout.decode(int(pattern, 16)) for pattern in vector["outputs"]]
    assert list(OPERATIONS[vector["operation"]](layout, *operands)) == outputs
    exact = operands[0] * operands[1] if vector["operation"] == "two_product" else sum(operands)
    if vector["operation"] == "multiply_expansions":
        exact = (operands[0] + operands[1]) * (operands[2] + operands[3])
    assert (sum(outputs) == exact) == vector["error_free"]


@pytest.mark.parametrize("pattern", SPLITS)
def test_split(pattern):
    hi, lo = numerics.split(from_bits([pattern], torch.float32), torch.bfloat16)
    assert " ".join(to_hexadecimal(hi, lo)) == SPLITS[pattern]


def test_split_beyond_the_largest_joins_to_nan():
    hi, lo = numerics.split(from_bits(["7f7f8000"], torch.float32), torch.bfloat16)
    assert torch.isnan(numerics.join(hi, lo)).all()


def test_split_again_keeps_the_value_and_may_change_the_bits():
    hi, lo = numerics.split(from_bits(["42ce802c"], torch.float32), torch.bfloat16)
    joined = numerics.join(hi, lo, dtype=torch.float32)
    again = numerics.split(joined, torch.bfloat16)
    assert to_hexadecimal(*again) == ["42ce", "3e80"]
    assert torch.equal(numerics.join(*again), numerics.join(hi, lo))


@pytest.mark.parametrize("beta2", BETA2_PAIRS)
def test_residual_of_beta2_is_taken_against_the_rounded_value(beta2):
    pair = [torch.tensor([part], dtype=torch.bfloat16) for part in split_scalar(beta2, torch.bfloat16)]
    assert " ".join(to_hexadecimal(*pair)) == BETA2_PAIRS[beta2]


def test_intermediate_overflow_is_where_the_docstring_says():
    a, b = from_bits(["7bc0"], torch.bfloat16), from_bits(["ff7f"], torch.bfloat16)
    s, e = numerics.two_sum(a, b)
    assert to_hexadecimal(s) == ["ff7e"]
    assert torch.isnan(e).all()
    assert to_hexadecimal(*numerics.fast_two_sum(b, a)) == ["ff7e", "7b00"]
    assert to_hexadecimal(*numerics.two_sum(b, a)) == ["ff7e", "7b00"]


def test_product_leaves_its_operands_alone():
    """A product that overwrites its operand turns (1, 0) * 0.95 into 3f67 bd45 = 0.854."""
    one, zero = from_bits(["3f80"], torch.bfloat16), from_bits(["0000"], torch.bfloat16)
    hi, lo = from_bits(["3f73"], torch.bfloat16), from_bits(["3a4d"], torch.bfloat16)
    assert to_hexadecimal(*numerics.multiply_expansions(one, zero, hi, lo)) == ["3f73", "3a4d"]
    assert to_hexadecimal(one, zero, hi, lo) == ["3f80", "0000", "3f73", "3a4d"]


@pytest.mark.parametrize("operation", ["two_sum", "fast_two_sum", "two_product"])
def test_mixed_formats_are_refused(operation):
    with pytest.raises(TypeError, match=r"one dtype.*bfloat16.*float32"):
        getattr(numerics, operation)(torch.ones(1), torch.ones(1, dtype=torch.bfloat16))


def test_two_product_refuses_fp64():
    with pytest.raises(TypeError, match="float64"):
        numerics.two_product(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
