"""How stored parts are read: residuals, which averages decay, and where torch's cast to 16 bits rounds once."""

from dataclasses import replace

import pytest
import torch
from collage_agent.sample.remainder_codes import SIGNED_BITS, codes_of
from collage_agent.sample.stored_parts import OURS, PLAIN, Composition, decaying
from collage_optim import CollageAdamW
from collage_optim.numerics.formats import round_to

BF16, FP16 = torch.bfloat16, torch.float16
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
