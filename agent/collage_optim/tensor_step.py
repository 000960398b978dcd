"""One tensor's step: its components as flat memory, chunk by chunk or through the compiled form.

`base.py` calls it for each tensor, the agent's audit and clones too. How long a chunk is is free: bits do not
depend on it (`tests/optim/test_tensor_step.py`).
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from collage_optim import integer_codes
from collage_optim.advance import Run, Step, advance_in_storage, advance_in_wide
from collage_optim.arithmetic import State, WideArithmetic
from collage_optim.blocks import BLOCK_ELEMENTS
from collage_optim.random_numbers import RandomSource, shard_number
from collage_optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PACKED_SECOND,
    SCALE_SUFFIX,
    StateStorage,
    StorageStrategy,
)
from collage_optim.update_rules import Moment

__all__ = [
    "Form",
    "Gathered",
    "Member",
    "chunk_elements",
    "chunks",
    "component_names",
    "form_of",
    "local_part",
    "longest_chunk",
    "name_in",
    "refuse_form",
    "sampled",
    "step_tensors",
    "stepped_together",
    "wide_dtype",
]

Form = tuple[torch.dtype, torch.device, torch.Size]
form_of: Callable[[Tensor], Form] = operator.attrgetter("dtype", "device", "shape")
_PLAIN: Final = {Tensor, Parameter}
_CPU_CHUNK_ELEMENTS = 1 << 17
_CPU_SHORT_CHUNK_ELEMENTS = 1 << 16
_DEVICE_CHUNK_ELEMENTS = 1 << 22
_CPU_SMALL_ELEMENTS, _CPU_TOGETHER_ELEMENTS = 1 << 14, 1 << 16
_DEVICE_SMALL_ELEMENTS, _DEVICE_TOGETHER_ELEMENTS = 1 << 21, 1 << 23
_SAMPLED_ELEMENTS = 256


def chunk_elements(device: torch.device, allocating: bool = False) -> int:
    """Elements per chunk: on a CPU its scratch fits the outer cache, on other devices launches must be few.

    allocating: the step makes temporaries instead of using scratch, which stay cheap only while they are small.
    """
    if device.type != "cpu":
        return _DEVICE_CHUNK_ELEMENTS
    return _CPU_SHORT_CHUNK_ELEMENTS if allocating else _CPU_CHUNK_ELEMENTS


def longest_chunk(device: torch.device) -> int:
    """The longest chunk that `chunks` makes on this device: the length of the scratch."""
    return chunk_elements(device) * 3 // 2


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format of wide arithmetic for parameters of `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def local_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lives here; a plain tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@dataclass(frozen=True)
class Member:
    """One parameter that takes a step by its gradient: its position in the optimizer and its states."""

    position: int
    parameter: Tensor
    state: State

    @property
    def gradient(self) -> Tensor:
        return cast(Tensor, self.parameter.grad)

    def components(self, names: list[str]) -> State:
        """Parameter and gradient, detached, and the named states, as far as they live on this process."""
        own = {"parameter": self.parameter.detach(), "gradient": self.gradient.detach()}
        return {name: local_part(own[name] if name in own else self.state[name]) for name in names}


class Gathered(NamedTuple):
    """A group's members at a step, and all that they were made from: where it is the same, so are they."""

    parameters: list[Tensor]
    forms: list[Form]
    states: list[State]
    members: list[Member]
    first_position: int

    def is_still(self, parameters: list[Tensor], forms: list[Form], states: list[Any], first_position: int) -> bool:
        """Whether the members are those of these parameters and states, objects for objects."""
        return (
            len(parameters) == len(self.members)
            and first_position == self.first_position
            and all(map(operator.is_, states, self.states))
            and all(map(operator.is_, parameters, self.parameters))
            and forms == self.forms
            and all(map(operator.contains, states, repeat("step")))
        )


def name_in(groups: Sequence[Mapping[str, Any]], parameter: Tensor) -> str:
    """A parameter's name if the optimizer of these groups was given names, otherwise its place; and its shape."""
    for number, group in enumerate(groups):
        for index, own in enumerate(group["params"]):
            if own is parameter:
                names = group.get("param_names")
                place = f"parameter {index} of group {number}" if names is None else str(names[index])
                return f"{place} of shape {tuple(parameter.shape)}"
    return f"a parameter of shape {tuple(parameter.shape)}"


def refuse_form(name: str, was: Form, now: Form) -> NoReturn:
    """Raise RuntimeError for a parameter that has another dtype, device or shape than its states were made for."""
    before, after = next(pair for pair in zip(was, now, strict=True) if pair[0] != pair[1])
    raise RuntimeError(
        f"{name} has become {after}; its states were made for {before}. Nothing was stepped. Build the optimizer "
        "after such a change; load_state_dict() then converts old states"
    )


def chunks(tensors: State, size: int) -> Iterator[State]:
    """Slice flat tensors of one length into chunks of nearly equal length, at most 1.5 times `size`: whole blocks,
    with the blocks' scales."""
    elements = tensors["parameter"].numel()
    blocks = math.ceil(elements / max(1, round(elements / size)) / BLOCK_ELEMENTS)
    length = blocks * BLOCK_ELEMENTS
    if length >= elements:
        return iter([tensors] if elements else [])
    sliced = zip(
        *(
            torch.split(tensor, blocks if name.endswith(SCALE_SUFFIX) else length)
            for name, tensor in tensors.items()
        ),
        strict=True,
    )
    return (dict(zip(tensors, parts, strict=True)) for parts in sliced)


def component_names(strategy: StorageStrategy, moments: tuple[Moment, ...]) -> list[str]:
    """The state keys of all elementwise components that a step reads and writes."""
    names = []
    for moment in moments:
        storage = strategy.moment_storage(moment.second)
        if storage is not StateStorage.BLOCKS_10 or moment.name != PACKED_SECOND:
            names.append(moment.name)
        if storage.has_low:
            names.append(moment.name + LOW_COMPONENT_SUFFIX)
        if storage.has_scales:
            names.append(moment.name + SCALE_SUFFIX)
    if strategy.parameter_state is not None:
        names.append(strategy.parameter_state)
    return names


def _few(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLED_ELEMENTS)][:_SAMPLED_ELEMENTS]


def sampled(members: Sequence[Member], names: list[str], averages: list[str]) -> State:
    """For a few elements of each member, in one flat vector each: parameter and gradient as they are, `weight` and
    the averages as the fp64 values of the named components."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("parameter", "gradient", "weight", *averages)}
    for member in members:
        held = member.components(["parameter", "gradient", *names])
        if not any(name.endswith(SCALE_SUFFIX) for name in held):
            # Before they are decoded: whole tensors in fp64 would take many times the parameters' memory.
            held = {name: _few(tensor) for name, tensor in held.items()}
        stored = held.get(MASTER_PARAMETER)
        values = {name: integer_codes.stored_value(held, name) for name in averages}
        values["weight"] = (
            integer_codes.stored_value(held, "parameter") if stored is None else stored.to(torch.float64)
        )
        for name, tensor in {**held, **values}.items():
            if name in parts:
                parts[name].append(_few(tensor))
    return {name: torch.cat(found) for name, found in parts.items()}


def step_tensors(step: Step, members: list[Member]) -> None:
    """Apply one step to these parameters and their elementwise states, in place; the caller counts the steps.

    Small tensors are stepped together as one vector, because a call costs as much as some ten thousand elements on
    a CPU, as a few million on a CUDA device. Stepped one by one, a small GPT (28 tensors, 250,000 elements) takes
    1.4 times as long on a CPU. The bits are the same, because elements never mix. Tensors stepped together share
    the random numbers of one tensor. Blocks, and shards, which draw other numbers than replicas, must not be mixed
    and are stepped one by one.

    On a CPU all large tensors are prepared before the first is stepped. A step sweeps the caches, and what Python
    does between two steps then takes several times as long.
    """
    if step.launch is not None:
        step.launch(step, members)
        return
    prepared: list[Run] = []
    for parts in stepped_together(step, members):
        member, components = parts[0]
        if len(parts) > 1:
            _step_together(step, [_flat(own) for _, own in parts], member.position)
            continue
        run = _prepared_components(step, components, member.position, shard_number(member.parameter))
        if run is not None and member.parameter.device.type == "cpu":
            prepared.append(run)
        elif run is not None:
            run()
    for run in prepared:
        run()


def stepped_together(step: Step, members: list[Member]) -> Iterator[list[tuple[Member, State]]]:
    """The members with their components: one alone, or several small ones that are stepped as one vector."""
    on_cpu = bool(members) and members[0].parameter.device.type == "cpu"
    small_elements = _CPU_SMALL_ELEMENTS if on_cpu else _DEVICE_SMALL_ELEMENTS
    together_elements = _CPU_TOGETHER_ELEMENTS if on_cpu else _DEVICE_TOGETHER_ELEMENTS
    names = ["parameter", "gradient", *component_names(step.strategy, step.moments)]
    mixed = not any(storage.has_scales for storage in step.strategy.storages)
    small: list[tuple[Member, State]] = []
    gathered = 0
    for member in members:
        components = member.components(names)
        elements = components["parameter"].numel()
        together = mixed and 0 < elements <= small_elements
        if step.seeding is not None and hasattr(member.parameter, "to_local"):
            together = False
        if not together or not all(tensor.is_contiguous() for tensor in components.values()):
            yield [(member, components)]
            continue
        small.append((member, components))
        gathered += elements
        if gathered >= together_elements:
            yield small
            small, gathered = [], 0
    if small:
        yield small


def _prepared_components(step: Step, components: State, position: int, shard: int) -> Run | None:
    """The step of one tensor's components, of one shape and any strides; None if it had to be made at once."""
    # What is not contiguous is stepped in a copy: flat memory would do if all layouts agreed, but they may differ.
    dense = {name: tensor.contiguous() for name, tensor in components.items()}
    run = _prepared_flat(step, _flat(dense), position, shard)
    if all(dense[name] is tensor for name, tensor in components.items()):
        return run
    run()
    for name, tensor in components.items():
        if dense[name] is not tensor and name != "gradient":
            tensor.copy_(dense[name])
    return None


def _flat(components: State) -> State:
    """Contiguous tensors as vectors. Most are vectors already, and a view that changes nothing has its cost."""
    flat = {name: tensor if tensor.dim() == 1 else tensor.view(-1) for name, tensor in components.items()}
    return cast(State, integer_codes.unpacked(flat))


def _step_together(step: Step, parts: list[State], position: int) -> None:
    """Step several tensors' flat components as one vector, and copy the results back. position: the first one's."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    sizes = [part["parameter"].numel() for part in parts]
    _prepared_flat(step, joined, position, 0)()
    for name, tensor in joined.items():
        if name != "gradient":
            torch._foreach_copy_([part[name] for part in parts], list(torch.split(tensor, sizes)))


def _prepared_flat(step: Step, flat: State, position: int, shard: int) -> Run:
    """The step of flat vectors of one length, compiled as a whole or chunk by chunk."""
    source = None if step.seeding is None else step.seeding.at(position, shard)
    if step.compiled is not None and flat["parameter"].numel():
        return step.compiled(flat, step.scalars, source)
    return partial(_step_in_chunks, step, flat, source)


def _step_in_chunks(step: Step, flat: State, source: RandomSource | None) -> None:
    first = 0
    for chunk in chunks(flat, chunk_elements(flat["parameter"].device, step.storage_arithmetic)):
        own, length = None if source is None else source.from_element(first), chunk["parameter"].numel()
        if step.storage_arithmetic:
            advance_in_storage(step, chunk, own)
        else:
            step.workspace.restart(length)
            advance_in_wide(step, WideArithmetic(step.workspace), chunk, source=own)
        first += length
