"""One tensor's step: its components as flat memory, chunk by chunk or through the compiled form."""

from collections.abc import Iterator

import torch
from torch import Tensor

from collage_agent.optim.advance import Step, advance_in_storage, advance_in_working
from collage_agent.optim.arithmetic import State, Working
from collage_agent.optim.rules import Moment
from collage_agent.optim.strategies import LOW_COMPONENT_SUFFIX, Kept, Strategy

__all__ = ["chunk_elements", "component_names", "step_tensor", "working_dtype"]

_CPU_CHUNK_ELEMENTS = 1 << 18
_CPU_SHORT_CHUNK_ELEMENTS = 1 << 16
_DEVICE_CHUNK_ELEMENTS = 1 << 22


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


def component_names(strategy: Strategy, moments: tuple[Moment, ...]) -> list[str]:
    """The state keys of all elementwise components that a tensor's step reads and writes."""
    names = []
    for moment in moments:
        names.append(moment.name)
        if strategy.kept(moment.second) is Kept.PAIR:
            names.append(moment.name + LOW_COMPONENT_SUFFIX)
    if strategy.parameter_state is not None:
        names.append(strategy.parameter_state)
    return names


def step_tensor(step: Step, parameter: Tensor, gradient: Tensor, state: State) -> None:
    """Move one parameter by one step, in place, with all elementwise states; `step` counters are the caller's.

    parameter and gradient: one shape and dtype, any strides; state: the elementwise states by key.
    """
    kept = {"parameter": parameter, "gradient": gradient}
    kept.update((name, state[name]) for name in component_names(step.strategy, step.moments))
    kept = {name: _local(tensor.detach()) for name, tensor in kept.items()}
    # What is not contiguous is stepped in a copy: flat memory would do if all layouts agreed, but they may differ.
    dense = {name: tensor.contiguous() for name, tensor in kept.items()}
    flat = {name: tensor.view(-1) for name, tensor in dense.items()}
    elements = flat["parameter"].numel()
    if step.compiled is not None and elements:
        step.compiled(flat, step.scalars)
    else:
        _step_chunks(step, flat, elements)
    for name, tensor in kept.items():
        if dense[name] is not tensor and name != "gradient":
            tensor.copy_(dense[name])


def _step_chunks(step: Step, flat: State, elements: int) -> None:
    """Advance flat tensors chunk by chunk."""
    allocating = step.storage_arithmetic or step.generator is not None
    for chunk in _chunks(flat, elements, chunk_elements(flat["parameter"].device, allocating)):
        if step.storage_arithmetic:
            advance_in_storage(step, chunk)
        else:
            step.workspace.restart()
            advance_in_working(step, Working(step.workspace), chunk)
