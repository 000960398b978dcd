"""Values kept as integers, wholly or in part: the bits below a bfloat16 number, 16-bit roots, blocks with scales.

Each is written once, in the operations of `WideArithmetic`: in scratch for a step in chunks, as new tensors for the
compiled step, checkpoints and the agent. Without random bits everything is rounded to nearest. Nothing
synchronises a device.

What is stored is fixed, because checkpoints hold it (`tests/optim/test_integer_codes.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from collage_optim.arithmetic import State, WideArithmetic
from collage_optim.blocks import BLOCK_ELEMENTS, load_blocks, store_blocks
from collage_optim.numerics.formats import round_at
from collage_optim.random_numbers import RandomBits
from collage_optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    PACKED_FIRST,
    PACKED_SECOND,
    SCALE_SUFFIX,
    StateStorage,
)

__all__ = [
    "CHANCE_BITS",
    "chances",
    "decoded",
    "empty_low",
    "empty_state",
    "gap_of",
    "load",
    "move_at_random",
    "move_by_gaps",
    "round_at_random",
    "round_sum_at_random",
    "state_of",
    "store",
    "store_low",
    "store_split",
    "stored_value",
    "unpacked",
]

CHANCE_BITS: Final = 16
"""Random bits that decide whether a weight moves by one gap more."""

_LARGEST_POSITIVE = 0x7FFFFFFF
_EXPONENT, _MANTISSA_BITS = 0x7F800000, 23
_SMALLEST_GAP = 2.0**-103
"""Of a weight's steps: where a weight is 0, updates up to 2^25 are as many gaps as fp32 can count."""
_ROOT_SCALE = 2.0**63
_ROOT_DROPPED = 15
_FINE_FROM, _FINE_UP_TO = 32 << _MANTISSA_BITS, 72 << _MANTISSA_BITS
"""Between which bits of a scaled root its codes are four times as dense: roots from 2^-32 to 2^8."""


def load(arithmetic: WideArithmetic, chunk: State, name: str, storage: StateStorage) -> Tensor:
    """A fresh wide copy of the stored value of a name, weights and averages alike."""
    low = chunk.get(name + LOW_COMPONENT_SUFFIX)
    if storage.is_split and low is not None:
        return _load_split(arithmetic, chunk[name], low, storage)
    if storage is StateStorage.ROOT:
        return _load_root(arithmetic, chunk[name])
    if storage.has_scales:
        packed = storage is StateStorage.BLOCKS_6
        return load_blocks(arithmetic, chunk[name], chunk[name + SCALE_SUFFIX], packed=packed)
    return arithmetic.load(chunk[name], low)


def store(
    arithmetic: WideArithmetic,
    value: Tensor,
    chunk: State,
    name: str,
    storage: StateStorage,
    draws: RandomBits | None = None,
) -> None:
    """Keep a wide value, used up: rounded to nearest, or at random with the numbers that are drawn."""
    high, low = chunk[name], chunk.get(name + LOW_COMPONENT_SUFFIX)
    if storage.is_split and low is not None:
        store_split(arithmetic, value, high, low, storage, draws)
    elif storage is StateStorage.ROOT:
        _store_root(arithmetic, value, high, draws)
    elif storage.has_scales:
        beside = storage is StateStorage.BLOCKS_10 and name == PACKED_SECOND
        signed = storage is StateStorage.BLOCKS_6 or high.dtype == torch.int8
        store_blocks(arithmetic, value, high, chunk[name + SCALE_SUFFIX], draws, signed=signed, beside=beside)
    elif draws is not None:
        round_at_random(arithmetic, value, high, draws)
    else:
        high.copy_(value)
        if low is not None:
            rest = arithmetic.rest(value, high)
            low.copy_(rest)
            arithmetic.give_back(rest)


def _load_split(arithmetic: WideArithmetic, high: Tensor, low: Tensor, storage: StateStorage) -> Tensor:
    """The fp32 number of which `high`, bfloat16, holds the upper bits and `low`, integers, the 16 or 8 ones below.

    Its bits are `high` · 2^16 + low; a byte is shifted to follow them: `high` is the number rounded to
    nearest, ties away from zero, and `low` signed. For int16 exactly what TransformerEngine's FusedAdam keeps
    (`store_param_remainders`).
    """
    value = arithmetic.load(high)
    rest = arithmetic.integers(low)
    joined = functools.partial(torch.add, alpha=0x100 if storage is StateStorage.SPLIT_24 else 1)
    bits = arithmetic.on(joined, value.view(torch.int32), rest)
    arithmetic.give_back(rest)
    return bits.view(torch.float32)


def store_split(
    arithmetic: WideArithmetic,
    value: Tensor,
    high: Tensor,
    low: Tensor,
    storage: StateStorage,
    draws: RandomBits | None = None,
) -> None:
    """Keep an fp32 value, used up: all of its bits, or 24 of them, rounded, as SPLIT_24.

    `high` is infinite from 7f7f8000 on, and for a NaN of the lower 15 bits alone; it is 0 for NaNs from ffff8000 on
    (`_below_wrap`). A `low` of 16 bits completes each of them to the value.
    """
    bits = _below_wrap(arithmetic, value.view(torch.int32), 0x8100)
    if storage is StateStorage.SPLIT_24:
        bits = _rounding(arithmetic, bits, 8, draws)
        byte = arithmetic.fresh(torch.bitwise_right_shift, bits, 8)
        low.copy_(byte)
        arithmetic.give_back(byte)
    else:
        low.copy_(bits)
    bits = arithmetic.on(torch.add, bits, 0x8000)
    high.copy_(arithmetic.on(torch.bitwise_and, bits, -0x10000).view(torch.float32))
    arithmetic.give_back(bits)


def store_low(value: Tensor, high: Tensor, low: Tensor) -> None:
    """Set `low` so that it completes `high` to the fp32 value, rounded where 24 bits are kept.

    `high` stays: where it is not the value rounded to nearest, ties to even or away from zero, the nearest low.
    """
    most = 2 ** (8 * low.element_size() - 1)
    rest = value.contiguous().view(torch.int32) - high.to(torch.float32).contiguous().view(torch.int32)
    if low.dtype == torch.int8:
        rest = (rest + 0x80) >> 8
    low.copy_(torch.where(value.isfinite(), rest, 0).clamp_(-most, most - 1))


def _below_wrap(arithmetic: WideArithmetic, bits: Tensor, added: int) -> Tensor:
    """The bits, at least `added` below the largest: the NaN of CUDA, 7fffffff, would become −0 by a carry.

    That of all bits, ffffffff, does become 0. Only a CPU's torch.maximum makes it, and `keep_maximum` takes its
    sign: looking for it in each rounding would make the compiled step up to a tenth dearer.
    """
    return arithmetic.on(torch.clamp_max, bits, _LARGEST_POSITIVE - added)


def _rounding(arithmetic: WideArithmetic, bits: Tensor, dropped: int, draws: RandomBits | None) -> Tensor:
    """The bits plus the rounding term for cutting `dropped` of them: a half, or as many random bits."""
    if draws is None:
        return arithmetic.on(torch.add, bits, 1 << (dropped - 1))
    drawn = draws.take(dropped)
    bits = arithmetic.on(torch.add, bits, drawn)
    arithmetic.give_back(drawn)
    return bits


def _load_root(arithmetic: WideArithmetic, code: Tensor) -> Tensor:
    """v from the 16 bits of its root, in an int16 without a sign.

    The codes count the fp32 numbers √v · 2^-63, which reach from 2^-149 to 2^128 in v, as fp32 does: 1,024 to each
    power of two for roots from 2^-32 to 2^8, and 256 elsewhere.
    """
    bits = arithmetic.integers(code)
    bits = arithmetic.on(torch.bitwise_and, bits, 0xFFFF)
    first, fine = _FINE_FROM >> _ROOT_DROPPED, (_FINE_UP_TO - _FINE_FROM) >> (_ROOT_DROPPED - 2)
    within = _clamped(arithmetic, bits, first, first + fine)
    bits = arithmetic.on(torch.bitwise_left_shift, bits, _ROOT_DROPPED)
    bits = arithmetic.on(functools.partial(torch.add, alpha=-(3 << (_ROOT_DROPPED - 2))), bits, within)
    bits = arithmetic.on(torch.add, bits, (3 * first) << (_ROOT_DROPPED - 2))
    arithmetic.give_back(within)
    root = arithmetic.on(torch.mul, bits.view(torch.float32), _ROOT_SCALE)
    return arithmetic.on(torch.mul, root, root)


def _store_root(arithmetic: WideArithmetic, value: Tensor, code: Tensor, draws: RandomBits | None = None) -> None:
    """Keep v ≥ 0, fp32, by its root, rounded at random or to nearest.

    Relative step 2^-10 for roots from 2^-32 to 2^8, else 2^-8. NaN and infinity become the largest number, 2^128 (1
    − 2^-8).
    """
    root = arithmetic.square_root(value)
    bits = arithmetic.on(torch.mul, root, 1 / _ROOT_SCALE).view(torch.int32)
    bits = arithmetic.on(torch.clamp_max, bits, (1 << 30) - (1 << _ROOT_DROPPED))
    # Numbers count four times if the codes are dense.
    within = _clamped(arithmetic, bits, _FINE_FROM, _FINE_UP_TO)
    within = arithmetic.on(torch.sub, within, _FINE_FROM)
    bits = arithmetic.on(functools.partial(torch.add, alpha=3), bits, within)
    arithmetic.give_back(within)
    bits = _rounding(arithmetic, bits, _ROOT_DROPPED, draws)
    code.copy_(arithmetic.on(torch.bitwise_right_shift, bits, _ROOT_DROPPED))
    arithmetic.give_back(bits)


def _clamped(arithmetic: WideArithmetic, values: Tensor, low: int, high: int) -> Tensor:
    """A fresh copy between two bounds."""
    if arithmetic.keeps_new_tensors:
        return torch.clamp(values, low, high)
    return torch.clamp(values, low, high, out=arithmetic.take(values).view(values.dtype))


def unpacked(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state in which packed moments lie under the keys of both; itself where none are."""
    if PACKED_SECOND in state or PACKED_SECOND + SCALE_SUFFIX not in state:
        return state
    return {**state, PACKED_SECOND: state[PACKED_FIRST]}


def round_at_random(arithmetic: WideArithmetic, value: Tensor, out: Tensor, draws: RandomBits) -> None:
    """Round fp32 `value`, used up, to out's format, up or down at random, so that the mean is right.

    Where out is fp32, to bfloat16 (`collage_optim.cpu_vectors`).
    """
    if out.dtype == torch.float16:
        out.copy_(round_at(value, out.dtype, draws.uniform()))
        return
    bits = _rounding(arithmetic, _below_wrap(arithmetic, value.view(torch.int32), 0xFFFF), 16, draws)
    out.copy_(arithmetic.on(torch.bitwise_and, bits, -0x10000).view(torch.float32))


def gap_of(arithmetic: WideArithmetic, value: Tensor, storage: StateStorage) -> Tensor:
    """The gaps of fp32 weights that are kept as SPLIT or SPLIT_24: those away from zero, at least 2^-103, fresh."""
    dropped = 8 if storage is StateStorage.SPLIT_24 else 0
    gap = arithmetic.fresh(torch.bitwise_and, value.view(torch.int32), _EXPONENT)
    smallest = math.frexp(_SMALLEST_GAP)[1] + 126 + _MANTISSA_BITS << _MANTISSA_BITS
    gap = arithmetic.on(torch.clamp_min, gap, smallest)
    return arithmetic.on(torch.sub, gap, _MANTISSA_BITS - dropped << _MANTISSA_BITS).view(torch.float32)


def move_at_random(arithmetic: WideArithmetic, value: Tensor, displacement: Tensor, draws: RandomBits) -> Tensor:
    """`move_by_gaps` of SPLIT weights, all used up."""
    gap = gap_of(arithmetic, value, StateStorage.SPLIT)
    return move_by_gaps(arithmetic, value, displacement, gap, chances(arithmetic, draws))


def chances(arithmetic: WideArithmetic, draws: RandomBits) -> Tensor:
    """CHANCE_BITS random bits an element, as fp32 numbers, fresh."""
    drawn = draws.take(CHANCE_BITS)
    chance = arithmetic.load(drawn)
    arithmetic.give_back(drawn)
    return chance


def move_by_gaps(
    arithmetic: WideArithmetic, value: Tensor, displacement: Tensor, gap: Tensor, chance: Tensor
) -> Tensor:
    """fp32 `value` + `displacement`, all used up, moved by a whole number of the value's gaps, drawn at random.

    chance: fp32 numbers of CHANCE_BITS random bits. The mean is right for updates far below the gap, down to 2^-16
    of it; zero moves nothing. Every operation is exact but the last, which rounds where the sum has wider gaps than
    the value.
    """
    number = arithmetic.over_power(displacement, gap)
    # Products with powers of two are exact: these are the bits of separate operations, in fewer passes.
    number.add_(chance, alpha=2.0**-CHANCE_BITS).floor_()
    value.addcmul_(number, gap)
    for vector in (chance, gap, number):
        arithmetic.give_back(vector)
    return value


def round_sum_at_random(
    arithmetic: WideArithmetic, total: Tensor, error: Tensor, draws: RandomBits, dropped: int
) -> Tensor:
    """`total` + `error`, of which total is the fp32 rounding, at random to fp32 with `dropped` bits 0.

    The share that decides is taken of the exact sum, in 24 bits of a gap: the mean is right for updates far below
    fp32's own resolution, down to 2^-24 of a gap of the result. Both tensors are used up.
    """
    nearest = arithmetic.fresh(torch.add, total.view(torch.int32), 0)
    nearest = _rounding(arithmetic, _below_wrap(arithmetic, nearest, 1 << dropped), dropped, None)
    nearest = arithmetic.on(torch.bitwise_and, nearest, -(1 << dropped))
    rest = arithmetic.on(torch.add, arithmetic.on(torch.sub, total, nearest.view(torch.float32)), error)
    arithmetic.give_back(error)
    # One more in the integer if the rest has the number's sign, otherwise one less.
    other = arithmetic.fresh(torch.bitwise_xor, rest.view(torch.int32), nearest)
    other = arithmetic.on(torch.bitwise_right_shift, other, 31)
    other = arithmetic.on(torch.bitwise_or, other, 1)
    other = arithmetic.on(torch.bitwise_left_shift, other, dropped)
    other = arithmetic.on(torch.add, other, nearest)
    gap = arithmetic.fresh(torch.sub, other.view(torch.float32), nearest.view(torch.float32))
    share = arithmetic.on(torch.div, rest, gap)
    arithmetic.give_back(gap)
    chosen = arithmetic.chosen(draws.uniform(), share, other, nearest).view(torch.float32)
    arithmetic.give_back(share)
    arithmetic.give_back(nearest)
    return chosen


def empty_state(name: str, storage: StateStorage, second: bool, parameter: Tensor) -> dict[str, Tensor]:
    """The state entries of an average that is zero, kept that way beside `parameter`.

    Raises ValueError for blocks of a sharded tensor, whose scales could not be cut as its elements are.
    """
    codes = torch.int16 if storage.is_root or storage.is_packed else parameter.dtype
    dtype = torch.float32 if storage is StateStorage.WIDE else codes
    if storage is StateStorage.BLOCKS:
        dtype = torch.uint8 if second else torch.int8
    state = {}
    if storage is not StateStorage.BLOCKS_10 or name != PACKED_SECOND:
        state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    if storage.has_low:
        state[name + LOW_COMPONENT_SUFFIX] = empty_low(storage, parameter)
    if storage.has_scales:
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"{name} in blocks is not for sharded parameters, whose blocks could not be cut as they are: "
                "use a strategy without blocks"
            )
        blocks = math.ceil(parameter.numel() / BLOCK_ELEMENTS)
        state[name + SCALE_SUFFIX] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
    return state


def state_of(
    name: str,
    value: Tensor,
    storage: StateStorage,
    second: bool,
    parameter: Tensor,
    others: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The state entries that keep an average's `value`, fp32 of the parameter's shape, rounded to nearest.

    others: the entries of averages before it. A packed second moment is written into the first one's tensor.
    """
    state = empty_state(name, storage, second, parameter)
    store(WideArithmetic(), value, dict(unpacked({**(others or {}), **state})), name, storage)
    return state


def empty_low(storage: StateStorage, parameter: Tensor) -> Tensor:
    """A second component of zero, in the dtype that this storage has beside `parameter`."""
    integers = {StateStorage.SPLIT: torch.int16, StateStorage.SPLIT_24: torch.int8}
    dtype = integers.get(storage, parameter.dtype)
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def decoded(
    state: Mapping[str, Tensor], name: str, high: Tensor | None = None, *, block: int = BLOCK_ELEMENTS
) -> Tensor | None:
    """The value of the integers under `name`, or beside it: fp32 of its shape, new; None if there are none.

    high: the weight itself, for name "parameter". block: elements that share a scale, in a sample fewer than kept.
    The dtypes say what is stored: see `StateStorage`. For a sharded tensor the result is sharded in the same way.
    """
    state = unpacked(state)
    first = (state[name] if high is None else high).detach()
    if hasattr(first, "to_local"):
        own = {key: value.to_local() for key, value in state.items() if hasattr(value, "to_local")}
        found = decoded(own, name, first.to_local())
        mesh = (first.device_mesh, first.placements)  # type: ignore[attr-defined]
        sharded = functools.partial(type(first).from_local, shape=first.shape, stride=first.stride())  # type: ignore[attr-defined]
        return None if found is None else sharded(found, *mesh, run_check=False)
    low, scale = state.get(name + LOW_COMPONENT_SUFFIX), state.get(name + SCALE_SUFFIX)
    if scale is not None:
        packed = name == PACKED_FIRST and first.dtype == torch.int16
        return load_blocks(WideArithmetic(), first, scale, block, packed=packed)
    if first.dtype == torch.int16:
        return _load_root(WideArithmetic(), first)
    if low is not None and not low.dtype.is_floating_point:
        # As `_load_split`, in two passes.
        value = first.to(torch.float32)
        value.view(torch.int32).add_(low, alpha=0x100 if low.dtype == torch.int8 else 1)
        return value
    return None


def stored_value(state: Mapping[str, Tensor], name: str, high: Tensor | None = None) -> Tensor:
    """The value that a state keeps under `name`, exactly, whatever the storage: fp64 of its shape, new.

    high: the weight itself, for name "parameter".
    """
    found = decoded(state, name, high)
    if found is not None:
        return found.to(torch.float64)
    value = (state[name] if high is None else high).detach().to(torch.float64, copy=True)
    low = state.get(name + LOW_COMPONENT_SUFFIX)
    return value if low is None else value.add_(low)
