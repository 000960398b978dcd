"""Values in blocks: integer codes of 6 to 16 bits, and one fp32 scale for each block of elements.

`integer_codes.py` keeps averages so, `coupling.py` first moments whose rounding the weight takes. What is stored is
fixed, because checkpoints hold it (`tests/optim/test_integer_codes.py`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from collage_optim.arithmetic import WideArithmetic
from collage_optim.random_numbers import RandomBits

__all__ = ["BLOCK_ELEMENTS", "levels_of", "load_blocks", "padded", "store_blocks", "store_sizes"]

BLOCK_ELEMENTS = 128
"""Elements that share a scale."""

_LEVELS: Final = {torch.int8: 127.0, torch.uint8: 255.0, torch.int16: 65535.0}
"""The largest code of blocks, by dtype; of six bits beside a second moment's: `levels_of`."""
_PACKED_BITS: Final = 6
"""Of the first moment, below those of a second one."""


def load_blocks(
    arithmetic: WideArithmetic, code: Tensor, scale: Tensor, block: int = BLOCK_ELEMENTS, *, packed: bool = False
) -> Tensor:
    """Values from codes c [n] and their blocks' scales s [⌈n / block⌉]: sign(c) (c / 127)² s for int8.

    uint8 codes hold the root of an unsigned value, ((c / 255)² s)², and int16 codes too, without a sign: ((c /
    65535)² s)². Small values of a block keep more digits than by equal steps: the smallest is 2^-16 of the largest
    for a root, 2^-32 for v; for 16 bits 2^-32 and 2^-64.
    packed: of the lowest six bits of int16 codes, signed: sign(c) (c / 31)² s. The second moment above them is read
    with all sixteen.
    """
    flat, elements = code.reshape(-1), code.numel()
    if elements % block:
        value = load_blocks(WideArithmetic(), padded(flat), scale, packed=packed)[:elements].view(code.shape)
        return value if arithmetic.keeps_new_tensors else arithmetic.load(value)
    signed = packed or code.dtype == torch.int8
    if code.dtype == torch.int16:
        codes = arithmetic.integers(flat)
        if packed:
            codes = arithmetic.on(torch.bitwise_left_shift, codes, 32 - _PACKED_BITS)
            codes = arithmetic.on(torch.bitwise_right_shift, codes, 32 - _PACKED_BITS)
        else:
            codes = arithmetic.on(torch.bitwise_and, codes, 0xFFFF)
        numbers = arithmetic.load(codes)
        arithmetic.give_back(codes)
    else:
        numbers = arithmetic.load(flat)
    sizes = torch.abs(numbers, out=arithmetic.take(numbers)) if signed else numbers
    squares = arithmetic.on(torch.mul, sizes, numbers)
    if signed:
        arithmetic.give_back(numbers)
    squares.view(-1, block).mul_((scale * (1 / levels_of(code, signed) ** 2)).unsqueeze(1))
    return (squares if signed else squares.square_()).view(code.shape)


def store_blocks(
    arithmetic: WideArithmetic,
    value: Tensor,
    code: Tensor,
    scale: Tensor,
    draws: RandomBits | None,
    *,
    signed: bool,
    beside: bool,
) -> None:
    """Keep fp32 values in codes of 6 to 16 bits, rounded at random or to nearest; sets the scales.

    value: any shape, its elements in the order of blocks. beside: the lowest six bits of `code` are a first
    moment's, and stay.
    """
    flat, elements = value.reshape(-1), value.numel()
    if elements % BLOCK_ELEMENTS:
        whole = padded(code.reshape(-1))
        longer = None if draws is None else draws.longer(whole)
        store_blocks(WideArithmetic(), padded(flat), whole, scale, longer, signed=signed, beside=beside)
        code.copy_(whole[:elements].view(code.shape))
        return
    sizes = torch.abs(flat, out=arithmetic.take(flat)) if signed else arithmetic.square_root(flat)
    lowest, needed = None, sizes
    if beside:
        lowest = _lowest_bits(arithmetic, code)
        # The largest code with these bits must reach every size. So the largest size is exact, and scales stay.
        reach = arithmetic.fresh(torch.add, lowest, levels_of(code, signed=False) + 1 - (1 << _PACKED_BITS))
        reach.mul_(1 / levels_of(code, signed=False)).square_()
        needed = arithmetic.fresh(torch.div, sizes, reach)
        arithmetic.give_back(reach)
    torch.amax(needed.view(-1, BLOCK_ELEMENTS), 1, out=scale)
    if beside:
        arithmetic.give_back(needed)
    drawn = None if draws is None else draws.uniform(2.0)
    arithmetic.give_back(store_sizes(arithmetic, sizes, code, scale, drawn, flat if signed else None, lowest))
    for vector in (drawn, lowest):
        if vector is not None:
            arithmetic.give_back(vector)


def store_sizes(
    arithmetic: WideArithmetic,
    sizes: Tensor,
    code: Tensor,
    scale: Tensor,
    threshold: Tensor | None = None,
    signs: Tensor | None = None,
    lowest: Tensor | None = None,
) -> Tensor:
    """Keep fp32 sizes, whole blocks of them and used up, in codes of 6 to 16 bits: of `signs`, if there are any.

    scale: the largest of each block. threshold: rounded up where twice the share of a step is more, from 0 up to 2;
    None: 1, to nearest. lowest: the lowest six bits that every code is to have, so that its steps are 64 times as
    wide. Returns the codes as fp32 numbers, a result. A block with a NaN or infinity becomes NaN.
    """
    levels, step = levels_of(code, signs is not None), 1 if lowest is None else 1 << _PACKED_BITS
    blocks = sizes.view(-1, BLOCK_ELEMENTS)
    blocks.div_(torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1))
    sizes.mul_(levels * levels)
    lower = arithmetic.square_root(sizes)
    if lowest is not None:
        lower.sub_(lowest).mul_(1 / step)
    lower.floor_().clamp_(0, (levels + 1) / step - 2)
    if lowest is not None:
        lower.mul_(step).add_(lowest)
    below = arithmetic.fresh(torch.mul, lower, lower)
    sizes.sub_(below)
    arithmetic.give_back(below)
    # Divided by half the gap it is twice the share, exactly: one pass to make that half, where the gap takes two.
    half = arithmetic.fresh(torch.add, lower, step / 2)
    if lowest is not None:
        half.mul_(step)
    sizes.div_(half)
    arithmetic.give_back(half)
    lower.add_(torch.gt(sizes, 1.0 if threshold is None else threshold, out=sizes), alpha=step)
    if signs is not None:
        lower.copysign_(signs)
        code.copy_(lower.view(code.shape))
    else:
        # By way of 32 bits: torch converts fp32 to uint8 one element at a time, five times as slowly.
        code.copy_(sizes.view(torch.int32).copy_(lower).view(code.shape))
    arithmetic.give_back(sizes)
    return lower


def levels_of(code: Tensor, signed: bool) -> float:
    """The largest code of blocks: int16 holds a signed one in its lowest six bits, one without a sign in all."""
    return 2.0 ** (_PACKED_BITS - 1) - 1 if signed and code.dtype == torch.int16 else _LEVELS[code.dtype]


def _lowest_bits(arithmetic: WideArithmetic, code: Tensor) -> Tensor:
    """A first moment's bits of packed codes, without a sign, as fp32 numbers: fresh."""
    bits = arithmetic.on(torch.bitwise_and, arithmetic.integers(code.reshape(-1)), (1 << _PACKED_BITS) - 1)
    numbers = arithmetic.load(bits)
    arithmetic.give_back(bits)
    return numbers


def padded(flat: Tensor) -> Tensor:
    """Zeros behind the elements up to whole blocks; a number as it is."""
    return pad(flat, (0, -flat.numel() % BLOCK_ELEMENTS)) if flat.dim() else flat
