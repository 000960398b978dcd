"""Advance some elements by one step: load the components, let the rule compute, store the components.

The strategy decides how values are loaded and stored, the arithmetic how precisely the rule is carried out
between.

`tensor_step.py` calls it for chunks, `compiled.py` for whole tensors: the bits are the same
(`tests/optim/test_compiled.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collage_optim import integer_codes
from collage_optim.arithmetic import Scalar, State, StorageArithmetic, WideArithmetic, Workspace
from collage_optim.coupling import store_coupled
from collage_optim.numerics.expansions import grow
from collage_optim.numerics.transformations import fast_two_sum, two_sum
from collage_optim.random_numbers import RandomBits, RandomSource, Seeding
from collage_optim.strategies import MASTER_PARAMETER, PARAMETER_LOW, StateStorage, StorageStrategy
from collage_optim.update_rules import Moment, UpdateRule

__all__ = ["Advance", "AskedTotals", "Run", "Step", "advance_in_storage", "advance_in_wide"]

_NOT_MOMENTS = ("parameter", "gradient", PARAMETER_LOW)


Run = Callable[[], object]
Advance = Callable[[State, Mapping[str, Scalar], RandomSource | None], Run]
"""Prepares a compiled step of these components; calling the result makes it."""


@dataclass(frozen=True)
class AskedTotals:
    """exact: the step's numbers in double precision. found: where what it adds up is left (`step_totals.py`)."""

    exact: Mapping[str, Scalar]
    found: list[Any]


@dataclass(frozen=True)
class Step:
    """Everything that a step needs besides the tensors. dtype: the weights'. is_coupled: whether weight and first
    moment exchange what rounding takes (`collage_optim.coupling`). launch: steps all tensors at once, on a device
    (`collage_optim.device_step`); asked: with it, that it adds up totals, from these numbers. counted: if a device
    counts the steps, each tensor's number, fp64 [tensors], by what gradients are multiplied, and 1 if the step is
    skipped, fp32 of no dimension; what follows from the number is then fp64 [tensors], too."""

    dtype: torch.dtype
    rule: UpdateRule
    strategy: StorageStrategy
    moments: tuple[Moment, ...]
    storage_arithmetic: bool
    maximize: bool
    scalars: Mapping[str, Scalar]
    workspace: Workspace
    seeding: Seeding | None = None
    compiled: Advance | None = None
    is_coupled: bool = False
    launch: Callable[["Step", list[Any]], None] | None = None
    asked: AskedTotals | None = None
    counted: tuple[Tensor, Tensor, Tensor] | None = None


def advance_in_wide(
    step: Step,
    arithmetic: WideArithmetic,
    chunk: State,
    scalars: Mapping[str, Scalar] | None = None,
    source: RandomSource | None = None,
) -> None:
    """Wide arithmetic: load all components as fp32, compute, split once on storing.

    scalars: in place of the step's own, where they are tensors that a compiler must not take for constants.
    """
    gradient = arithmetic.load(chunk["gradient"])
    if step.maximize:
        gradient.neg_()
    moments = {
        moment.name: integer_codes.load(arithmetic, chunk, moment.name, step.strategy.moment_storage(moment.second))
        for moment in step.moments
    }
    if step.strategy.parameter is StateStorage.WIDE:
        value = arithmetic.load(chunk[MASTER_PARAMETER])
    else:
        value = integer_codes.load(arithmetic, chunk, "parameter", step.strategy.parameter)
    scalars = scalars or step.scalars
    draws = None if source is None else RandomBits(source, arithmetic, chunk["gradient"])
    coupled = None
    if step.is_coupled and draws is not None:
        moved = step.rule.coupled_displacement(arithmetic, value, gradient, moments, scalars)
        arithmetic.give_back(gradient)
        coupled = next(moment.name for moment in step.moments if not moment.second)
        storage = step.strategy.parameter
        store_coupled(arithmetic, chunk, coupled, storage, value, moved, moments[coupled], draws)
    else:
        displacement = step.rule.displacement(arithmetic, value, gradient, moments, scalars)
        arithmetic.give_back(gradient)
        _store_parameter(step, arithmetic, value, displacement, chunk, draws)
    for moment in step.moments:
        if moment.name == coupled:
            continue
        storage = step.strategy.moment_storage(moment.second)
        if moment.second and storage not in (StateStorage.SINGLE, StateStorage.WIDE):
            # The square of a finite gradient may be infinite: as a pair that would be infinity minus infinity, as
            # the scale of a block zero times infinity.
            moments[moment.name] = arithmetic.at_most(moments[moment.name], torch.finfo(step.dtype).max)
        drawn = draws if step.strategy.stochastic_moment(moment.second) else None
        integer_codes.store(arithmetic, moments[moment.name], chunk, moment.name, storage, drawn)


def _store_parameter(
    step: Step,
    arithmetic: WideArithmetic,
    value: Tensor,
    displacement: Tensor,
    chunk: State,
    draws: RandomBits | None,
) -> None:
    """Store `value` + `displacement`, both used up, as the strategy keeps a weight."""
    parameter, storage = chunk["parameter"], step.strategy.parameter
    if storage is StateStorage.COMPENSATED:
        # Add the displacement to the compensation first: both are small numbers, added in fp32.
        low = chunk[PARAMETER_LOW]
        pending = arithmetic.load(low).add_(displacement)
        before = arithmetic.load(parameter)
        parameter.copy_(arithmetic.load(parameter).add_(pending))
        low.copy_(pending.sub_(before.neg_().add_(parameter)))
        return
    if draws is not None and storage is StateStorage.SPLIT:
        total = integer_codes.move_at_random(arithmetic, value, displacement, draws)
        integer_codes.store(arithmetic, total, chunk, "parameter", storage)
        return
    if draws is not None and step.strategy.stochastic_parameter:
        if storage is StateStorage.PAIR:
            # Rounded at random, a pair may hold more bits than fp32: small numbers first.
            value = arithmetic.load(parameter)
            displacement = arithmetic.load(chunk[PARAMETER_LOW]).add_(displacement)
        total = arithmetic.total(value, displacement)
        error = _sum_error(arithmetic, value, displacement, total)
        _store_at_random(arithmetic, total, error, chunk, storage, draws)
        return
    total = arithmetic.total(value, displacement)
    if storage is StateStorage.WIDE:
        chunk[MASTER_PARAMETER].copy_(total)
        storage = StateStorage.SINGLE
    integer_codes.store(arithmetic, total, chunk, "parameter", storage, None)


def _sum_error(arithmetic: WideArithmetic, a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """a + b − total exactly, of which total is the rounded sum (`two_sum`); a and b are used up."""
    b_seen = arithmetic.fresh(torch.sub, total, a)
    a_seen = arithmetic.fresh(torch.sub, total, b_seen)
    error = arithmetic.on(torch.add, arithmetic.on(torch.sub, a, a_seen), arithmetic.on(torch.sub, b, b_seen))
    for vector in (a_seen, b_seen, b):
        arithmetic.give_back(vector)
    return error


def _store_at_random(
    arithmetic: WideArithmetic, total: Tensor, error: Tensor, chunk: State, storage: StateStorage, draws: RandomBits
) -> None:
    """Keep the weight `total` + `error`, its last component rounded at random. Both are used up."""
    parameter = chunk["parameter"]
    if storage is StateStorage.PAIR:
        parameter.copy_(total)
        rest = arithmetic.on(torch.add, arithmetic.rest(total, parameter), error)
        integer_codes.round_at_random(arithmetic, rest, chunk[PARAMETER_LOW], draws)
    elif storage is StateStorage.SPLIT_24:
        rounded = integer_codes.round_sum_at_random(arithmetic, total, error, draws, 8)
        integer_codes.store_split(arithmetic, rounded, parameter, chunk[PARAMETER_LOW], storage)
    elif parameter.dtype != torch.float16:
        parameter.copy_(integer_codes.round_sum_at_random(arithmetic, total, error, draws, 16))
    else:
        integer_codes.round_at_random(arithmetic, total.to(torch.float64).add_(error), parameter, draws)


def advance_in_storage(step: Step, chunk: State, source: RandomSource | None = None) -> None:
    """Strict arithmetic: every named operation rounded to the storage format, no fp32 in between."""
    gradient = -chunk["gradient"] if step.maximize else chunk["gradient"]
    draws = None if source is None else RandomBits(source, WideArithmetic(), gradient)
    moments = {name: tensor for name, tensor in chunk.items() if name not in _NOT_MOMENTS}
    rounded = {}
    if draws is not None:
        rounded = {
            moment.name: partial(_rounded, gradient.dtype, draws)
            for moment in step.moments
            if step.strategy.stochastic_moment(moment.second)
        }
    arithmetic = StorageArithmetic(rounded)
    displacement = step.rule.displacement(arithmetic, chunk["parameter"], gradient, moments, step.scalars)
    for name, value in moments.items():
        if value is not chunk[name]:
            chunk[name].copy_(value)
    if draws is not None and step.strategy.stochastic_parameter:
        _move_at_random(step.strategy, chunk, displacement, draws)
        return
    high, low = _moved_in_storage(step, chunk["parameter"], chunk.get(PARAMETER_LOW), displacement)
    chunk["parameter"].copy_(high)
    if low is not None:
        chunk[PARAMETER_LOW].copy_(low)


def _rounded(dtype: torch.dtype, draws: RandomBits, value: Tensor) -> Tensor:
    """An fp32 value rounded at random to `dtype`."""
    out = torch.empty_like(value, dtype=dtype)
    integer_codes.round_at_random(WideArithmetic(), value, out, draws)
    return out


def _move_at_random(strategy: StorageStrategy, chunk: State, displacement: Tensor, draws: RandomBits) -> None:
    """The weight's components after the displacement, the last one rounded at random."""
    parameter, wide = chunk["parameter"], WideArithmetic()
    if strategy.parameter is StateStorage.PAIR:
        low = chunk[PARAMETER_LOW]
        high, rest = two_sum(parameter, displacement)
        rest = _rounded(low.dtype, draws, rest.to(torch.float32) + low.to(torch.float32))
        high, rest = fast_two_sum(high, rest)
        parameter.copy_(high)
        low.copy_(rest)
        return
    total, error = two_sum(parameter.to(torch.float32), displacement.to(torch.float32))
    _store_at_random(wide, total, error, chunk, strategy.parameter, draws)


def _moved_in_storage(
    step: Step, parameter: Tensor, low: Tensor | None, displacement: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The weight's components after the displacement, each operation rounded to their format."""
    if low is None:
        return parameter + displacement, None
    if step.strategy.parameter is StateStorage.COMPENSATED:
        pending = low + displacement
        total = parameter + pending
        return total, pending - (total - parameter)
    return grow(parameter, low, displacement)
