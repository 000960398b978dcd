"""A measured step: the same step, with each chunk's intended and effective update taken down on the way."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from collage_agent.optim.advance import Step, advance_in_storage, advance_in_working
from collage_agent.optim.arithmetic import Scalar, State, Working
from collage_agent.optim.strategies import LOW_COMPONENT_SUFFIX, MASTER_PARAMETER, PARAMETER_LOW
from collage_agent.optim.totals import Observation

__all__ = ["observe_around", "observe_storage_chunk", "observe_working_chunk"]


def _kept(chunk: State, dtype: torch.dtype) -> Tensor:
    """The stored weight in a wide format, as a new tensor."""
    value = chunk.get(MASTER_PARAMETER, chunk["parameter"]).to(dtype, copy=True)
    low = chunk.get(PARAMETER_LOW)
    return value if low is None else value.add_(low)


def _has_more_than_it_shows(chunk: State) -> bool:
    """Whether the stored weight is more than the registered parameter."""
    return MASTER_PARAMETER in chunk or PARAMETER_LOW in chunk


def observe_working_chunk(
    step: Step,
    arithmetic: Working,
    chunk: State,
    scalars: Mapping[str, Scalar] | None = None,
    generator: torch.Generator | None = None,
) -> Observation:
    """Advance a chunk in wide arithmetic and return what was seen; u is the displacement that the step computed."""
    visible_before = arithmetic.load(chunk["parameter"]) if _has_more_than_it_shows(chunk) else None
    moved = advance_in_working(step, arithmetic, chunk, scalars, generator)
    stored, low = chunk.get(MASTER_PARAMETER, chunk["parameter"]), chunk.get(PARAMETER_LOW)
    effective = arithmetic.load(stored, low).sub_(moved.before)
    visible = None
    if visible_before is not None:
        visible = arithmetic.load(chunk["parameter"]).sub_(visible_before)
    return Observation(moved.displacement, effective, visible, moved.gradient, arithmetic.take)


def observe_storage_chunk(step: Step, chunk: State, generator: torch.Generator | None) -> Observation:
    """Advance a chunk in storage arithmetic and return what was seen; u is computed in fp64, unrounded."""
    return observe_around(step, chunk, lambda: advance_in_storage(step, chunk, generator))


def observe_around(step: Step, chunk: State, advance: Callable[[], object]) -> Observation:
    """Call `advance`, which moves the chunk's components in any way, and return what was seen, flat and in fp64."""
    before = _kept(chunk, torch.float64)
    visible = chunk["parameter"].to(torch.float64) if _has_more_than_it_shows(chunk) else None
    intended = _exact_displacement(step, chunk, before)
    advance()
    effective = _kept(chunk, torch.float64).sub_(before)
    change = None if visible is None else chunk["parameter"].to(torch.float64).sub_(visible)
    gradient = chunk["gradient"].to(torch.float64)
    flat = [tensor.reshape(-1) for tensor in (intended, effective, gradient)]
    return Observation(flat[0], flat[1], None if change is None else change.reshape(-1), flat[2])


def _exact_displacement(step: Step, chunk: State, value: Tensor) -> Tensor:
    """The step's displacement in fp64 from the components as they are kept; they are left alone."""
    state = {}
    for moment in step.moments:
        state[moment.name] = chunk[moment.name].to(torch.float64, copy=True)
        low = chunk.get(moment.name + LOW_COMPONENT_SUFFIX)
        if low is not None:
            state[moment.name].add_(low)
    gradient = chunk["gradient"].to(torch.float64)
    if step.maximize:
        gradient = -gradient
    return step.rule.displacement(Working(), value, gradient, state, step.scalars)
