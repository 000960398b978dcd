"""Advance some elements by one step: load the components, let the rule compute, store the components.

The strategy decides how values are loaded and stored, the arithmetic how precisely the rule is carried out
between.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_agent.numerics.expansions import grow
from collage_agent.numerics.formats import stochastic_round
from collage_agent.numerics.transformations import fast_two_sum, two_sum
from collage_agent.optim.arithmetic import Scalar, State, StorageArithmetic, WideArithmetic, Workspace
from collage_agent.optim.random_numbers import Seeding
from collage_agent.optim.rules import Moment, UpdateRule
from collage_agent.optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    StateStorage,
    StorageStrategy,
)

__all__ = ["Step", "advance_in_storage", "advance_in_wide"]

_NOT_MOMENTS = ("parameter", "gradient", PARAMETER_LOW)


@dataclass(frozen=True)
class Step:
    """Everything that a step needs besides the tensors."""

    rule: UpdateRule
    strategy: StorageStrategy
    moments: tuple[Moment, ...]
    storage_arithmetic: bool
    maximize: bool
    scalars: Mapping[str, Scalar]
    workspace: Workspace
    seeding: Seeding | None = None
    compiled: Callable[[State, Mapping[str, Scalar]], None] | None = None


def advance_in_wide(
    step: Step,
    arithmetic: WideArithmetic,
    chunk: State,
    scalars: Mapping[str, Scalar] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Wide arithmetic: load all components as fp32, compute, split once on storing.

    scalars: in place of the step's own, where they are tensors that a compiler must not take for constants.
    """
    gradient = arithmetic.load(chunk["gradient"])
    if step.maximize:
        gradient.neg_()
    moments = {
        moment.name: arithmetic.load(chunk[moment.name], chunk.get(moment.name + LOW_COMPONENT_SUFFIX))
        for moment in step.moments
    }
    stored = chunk.get(MASTER_PARAMETER, chunk["parameter"])
    value = arithmetic.load(stored, chunk.get(PARAMETER_LOW))
    displacement = step.rule.displacement(arithmetic, value, gradient, moments, scalars or step.scalars)
    _store_parameter(step, arithmetic, value, displacement, chunk, generator)
    for moment in step.moments:
        source = generator if step.strategy.stochastic_moment(moment.second) else None
        low = chunk.get(moment.name + LOW_COMPONENT_SUFFIX)
        _store(arithmetic, moments[moment.name], chunk[moment.name], low, source)


def _store_parameter(
    step: Step,
    arithmetic: WideArithmetic,
    value: Tensor,
    displacement: Tensor,
    chunk: State,
    generator: torch.Generator | None,
) -> None:
    """Store `value` + `displacement` as the strategy keeps a weight; changes neither of the two."""
    parameter, low = chunk["parameter"], chunk.get(PARAMETER_LOW)
    if step.strategy.parameter is StateStorage.COMPENSATED and low is not None:
        # The compensation takes the displacement up before the weight does: two small numbers, added in fp32.
        pending = arithmetic.load(low).add_(displacement)
        before = arithmetic.load(parameter)
        parameter.copy_(arithmetic.load(parameter).add_(pending))
        low.copy_(pending.sub_(before.neg_().add_(parameter)))
        return
    value = arithmetic.total(value, displacement)
    if step.strategy.parameter is StateStorage.WIDE:
        chunk[MASTER_PARAMETER].copy_(value)
    _store(arithmetic, value, parameter, low, generator)


def _store(
    arithmetic: WideArithmetic, value: Tensor, high: Tensor, low: Tensor | None, generator: torch.Generator | None
) -> None:
    """Round a wide value into its components, the last one at random if there is a generator."""
    if low is None:
        _round_into(value, high, generator)
        return
    high.copy_(value)
    rest = arithmetic.rest(value, high)
    _round_into(rest, low, generator)
    arithmetic.give_back(rest)


def _round_into(value: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
    out.copy_(value if generator is None else stochastic_round(value, out.dtype, generator))


def advance_in_storage(step: Step, chunk: State, generator: torch.Generator | None = None) -> None:
    """Strict arithmetic: every named operation rounded to the storage format, no fp32 in between."""
    gradient = -chunk["gradient"] if step.maximize else chunk["gradient"]
    moments = {name: tensor for name, tensor in chunk.items() if name not in _NOT_MOMENTS}
    names = frozenset(moment.name for moment in step.moments if step.strategy.stochastic_moment(moment.second))
    arithmetic = StorageArithmetic(names, generator)
    displacement = step.rule.displacement(arithmetic, chunk["parameter"], gradient, moments, step.scalars)
    for name, value in moments.items():
        if value is not chunk[name]:
            chunk[name].copy_(value)
    high, low = _moved_in_storage(step, chunk["parameter"], chunk.get(PARAMETER_LOW), displacement, generator)
    chunk["parameter"].copy_(high)
    if low is not None:
        chunk[PARAMETER_LOW].copy_(low)


def _moved_in_storage(
    step: Step, parameter: Tensor, low: Tensor | None, displacement: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """The weight's components after the displacement, each operation rounded to their format."""
    if low is None:
        if generator is None:
            return parameter + displacement, None
        total = parameter.to(torch.float32) + displacement.to(torch.float32)
        return stochastic_round(total, parameter.dtype, generator), None
    if step.strategy.parameter is StateStorage.COMPENSATED:
        pending = low + displacement
        total = parameter + pending
        return total, pending - (total - parameter)
    if generator is None:
        return grow(parameter, low, displacement)
    high, rest = two_sum(parameter, displacement)
    rest = stochastic_round(rest.to(torch.float32) + low.to(torch.float32), low.dtype, generator)
    return fast_two_sum(high, rest)
