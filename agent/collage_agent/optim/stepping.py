"""One tensor's step: chunk by chunk, load the components, let the rule compute, store the components.

The strategy decides how values are loaded and stored, the arithmetic how precisely the rule is carried out
between.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_agent.numerics.expansions import grow
from collage_agent.optim.arithmetic import Scalar, State, Storage, Working, Workspace
from collage_agent.optim.rules import Rule
from collage_agent.optim.strategies import LOW_COMPONENT_SUFFIX, MASTER_PARAMETER, PARAMETER_LOW, Kept, Strategy

__all__ = ["Step", "chunk_elements", "step_tensor", "working_dtype"]

_CPU_CHUNK_ELEMENTS = 1 << 17
_DEVICE_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Step:
    """All that one tensor's step needs to know beside its tensors."""

    rule: Rule
    strategy: Strategy
    storage_arithmetic: bool
    maximize: bool
    scalars: Mapping[str, Scalar]
    workspace: Workspace


def chunk_elements(device: torch.device) -> int:
    """The elements of a chunk: its scratch fits the outer cache of a CPU; elsewhere launches must be few."""
    return _CPU_CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS


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
    for chunk in _chunks(flat, elements, chunk_elements(parameter.device)):
        advance(step, chunk)
    for name, tensor in kept.items():
        if dense[name] is not tensor and name != "gradient":
            tensor.copy_(dense[name])


def _moment_names(chunk: State) -> list[str]:
    """The moving averages among a chunk's tensors: neither the weight's components nor anyone's low part."""
    own = ("parameter", "gradient", MASTER_PARAMETER)
    return [name for name in chunk if name not in own and not name.endswith(LOW_COMPONENT_SUFFIX)]


def _working_chunk(step: Step, chunk: State) -> None:
    """Wide arithmetic: load all components as fp32, compute, split once on storing."""
    step.workspace.restart()
    arithmetic = Working(step.workspace)
    parameter = chunk["parameter"]
    gradient = arithmetic.load(chunk["gradient"])
    if step.maximize:
        gradient.neg_()
    names = _moment_names(chunk)
    moments = {name: arithmetic.load(chunk[name], chunk.get(name + LOW_COMPONENT_SUFFIX)) for name in names}
    master = chunk.get(MASTER_PARAMETER)
    value = arithmetic.load(parameter if master is None else master, chunk.get(PARAMETER_LOW))
    value.add_(step.rule.displacement(arithmetic, value, gradient, moments, step.scalars))
    if master is not None:
        master.copy_(value)
    _store(arithmetic, value, parameter, chunk.get(PARAMETER_LOW))
    for name in names:
        _store(arithmetic, moments[name], chunk[name], chunk.get(name + LOW_COMPONENT_SUFFIX))


def _store(arithmetic: Working, value: Tensor, high: Tensor, low: Tensor | None) -> None:
    """Round a wide value into its stored components: the high part to nearest, the low part what it lacks."""
    high.copy_(value)
    if low is not None:
        low.copy_(arithmetic.difference(value, high))


def _storage_chunk(step: Step, chunk: State) -> None:
    """Strict arithmetic: every named operation rounded to the storage format, no fp32 in between."""
    parameter = chunk["parameter"]
    gradient = -chunk["gradient"] if step.maximize else chunk["gradient"]
    moments = {name: chunk[name] for name in chunk if name not in ("parameter", "gradient", PARAMETER_LOW)}
    displacement = step.rule.displacement(Storage(), parameter, gradient, moments, step.scalars)
    for name, value in moments.items():
        if value is not chunk[name]:
            chunk[name].copy_(value)
    if step.strategy.parameter is Kept.PAIR:
        low = chunk[PARAMETER_LOW]
        high, rest = grow(parameter, low, displacement)
        parameter.copy_(high)
        low.copy_(rest)
    else:
        parameter.add_(displacement)
