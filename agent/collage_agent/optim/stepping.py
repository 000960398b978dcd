"""One tensor's step: chunk by chunk, load the components, let the rule compute, store the components.

The strategy decides how values are loaded and stored, the arithmetic how precisely the rule is carried out
between.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_agent.numerics.expansions import grow
from collage_agent.numerics.stochastic import stochastic_round
from collage_agent.numerics.transformations import fast_two_sum, two_sum
from collage_agent.optim.arithmetic import Scalar, State, Storage, Working, Workspace
from collage_agent.optim.rules import Moment, Rule
from collage_agent.optim.strategies import LOW_COMPONENT_SUFFIX, MASTER_PARAMETER, PARAMETER_LOW, Kept, Strategy

__all__ = ["Step", "chunk_elements", "step_tensor", "working_dtype"]

_CPU_CHUNK_ELEMENTS = 1 << 18
_CPU_SHORT_CHUNK_ELEMENTS = 1 << 16
_DEVICE_CHUNK_ELEMENTS = 1 << 22
_NOT_MOMENTS = ("parameter", "gradient", PARAMETER_LOW)


@dataclass(frozen=True)
class Step:
    """All that one tensor's step needs to know beside its tensors."""

    rule: Rule
    strategy: Strategy
    moments: tuple[Moment, ...]
    storage_arithmetic: bool
    maximize: bool
    scalars: Mapping[str, Scalar]
    workspace: Workspace
    generator: torch.Generator | None = None


def chunk_elements(device: torch.device, allocating: bool = False) -> int:
    """The elements of a chunk: its scratch fits the outer cache of a CPU; elsewhere launches must be few.

    allocating: the step makes temporaries instead of using scratch, which stay cheap only while they are small.
    The random numbers of stochastic rounding are drawn chunk by chunk: another size gives other roundings.
    """
    if device.type != "cpu":
        return _DEVICE_CHUNK_ELEMENTS
    return _CPU_SHORT_CHUNK_ELEMENTS if allocating else _CPU_CHUNK_ELEMENTS


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format of wide arithmetic for parameters of `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lives here; a plain tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _chunks(tensors: State, elements: int, size: int) -> Iterator[State]:
    """Slice flat tensors of one length into chunks of `size`."""
    for start in range(0, elements, size):
        length = min(size, elements - start)
        yield {name: tensor.narrow(0, start, length) for name, tensor in tensors.items()}


def step_tensor(step: Step, parameter: Tensor, gradient: Tensor, state: State) -> None:
    """Move one parameter by one step, in place, with all elementwise states; `step` counters are the caller's.

    parameter and gradient: one shape and dtype, any strides; state: the elementwise states by key.
    """
    kept = {"parameter": parameter, "gradient": gradient, **state}
    kept = {name: _local(tensor.detach()) for name, tensor in kept.items() if name != "step"}
    # What is not contiguous is stepped in a copy: flat memory would do if all layouts agreed, but they may differ.
    dense = {name: tensor.contiguous() for name, tensor in kept.items()}
    flat = {name: tensor.view(-1) for name, tensor in dense.items()}
    advance = _storage_chunk if step.storage_arithmetic else _working_chunk
    elements = flat["parameter"].numel()
    allocating = step.storage_arithmetic or step.generator is not None
    for chunk in _chunks(flat, elements, chunk_elements(parameter.device, allocating)):
        advance(step, chunk)
    for name, tensor in kept.items():
        if dense[name] is not tensor and name != "gradient":
            tensor.copy_(dense[name])


def _working_chunk(step: Step, chunk: State) -> None:
    """Wide arithmetic: load all components as fp32, compute, split once on storing."""
    step.workspace.restart()
    arithmetic = Working(step.workspace)
    gradient = arithmetic.load(chunk["gradient"])
    if step.maximize:
        gradient.neg_()
    moments = {
        moment.name: arithmetic.load(chunk[moment.name], chunk.get(moment.name + LOW_COMPONENT_SUFFIX))
        for moment in step.moments
    }
    stored = chunk.get(MASTER_PARAMETER, chunk["parameter"])
    value = arithmetic.load(stored, chunk.get(PARAMETER_LOW))
    displacement = step.rule.displacement(arithmetic, value, gradient, moments, step.scalars)
    _store_parameter(step, arithmetic, value, displacement, chunk)
    for moment in step.moments:
        generator = step.generator if step.strategy.stochastic_moment(moment.second) else None
        low = chunk.get(moment.name + LOW_COMPONENT_SUFFIX)
        _store(arithmetic, moments[moment.name], chunk[moment.name], low, generator)


def _store_parameter(step: Step, arithmetic: Working, value: Tensor, displacement: Tensor, chunk: State) -> None:
    """Move the weight, given its wide value, and store it as the strategy says."""
    parameter, low = chunk["parameter"], chunk.get(PARAMETER_LOW)
    if step.strategy.parameter is Kept.COMPENSATED and low is not None:
        # The compensation takes the displacement up before the weight does: two small numbers, added in fp32.
        pending = displacement.add_(low)
        before = arithmetic.load(parameter)
        parameter.copy_(arithmetic.load(parameter).add_(pending))
        low.copy_(pending.sub_(before.neg_().add_(parameter)))
        return
    value.add_(displacement)
    if step.strategy.parameter is Kept.WIDE:
        chunk[MASTER_PARAMETER].copy_(value)
    _store(arithmetic, value, parameter, low, step.generator)


def _store(
    arithmetic: Working, value: Tensor, high: Tensor, low: Tensor | None, generator: torch.Generator | None
) -> None:
    """Round a wide value into its components; the last one at random where there is a generator."""
    if low is None:
        _round_into(value, high, generator)
        return
    high.copy_(value)
    _round_into(arithmetic.difference(value, high), low, generator)


def _round_into(value: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
    out.copy_(value if generator is None else stochastic_round(value, out.dtype, generator))


def _storage_chunk(step: Step, chunk: State) -> None:
    """Strict arithmetic: every named operation rounded to the storage format, no fp32 in between."""
    gradient = -chunk["gradient"] if step.maximize else chunk["gradient"]
    moments = {name: tensor for name, tensor in chunk.items() if name not in _NOT_MOMENTS}
    names = frozenset(moment.name for moment in step.moments if step.strategy.stochastic_moment(moment.second))
    arithmetic = Storage(names, step.generator)
    displacement = step.rule.displacement(arithmetic, chunk["parameter"], gradient, moments, step.scalars)
    for name, value in moments.items():
        if value is not chunk[name]:
            chunk[name].copy_(value)
    high, low = _moved_in_storage(step, chunk["parameter"], chunk.get(PARAMETER_LOW), displacement)
    chunk["parameter"].copy_(high)
    if low is not None:
        chunk[PARAMETER_LOW].copy_(low)


def _moved_in_storage(
    step: Step, parameter: Tensor, low: Tensor | None, displacement: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The weight's components after the displacement, each operation rounded to their format."""
    if low is None:
        if step.generator is None:
            return parameter + displacement, None
        total = parameter.to(torch.float32) + displacement.to(torch.float32)
        return stochastic_round(total, parameter.dtype, step.generator), None
    if step.strategy.parameter is Kept.COMPENSATED:
        pending = low + displacement
        total = parameter + pending
        return total, pending - (total - parameter)
    if step.generator is None:
        return grow(parameter, low, displacement)
    high, rest = two_sum(parameter, displacement)
    rest = stochastic_round(rest.to(torch.float32) + low.to(torch.float32), low.dtype, step.generator)
    return fast_two_sum(high, rest)
