"""An optimizer's state for one parameter, as a flat mapping of names, wherever the optimizer keeps it.

Most keep `state[parameter][name]`. HeavyBall keeps a mapping for each view of a parameter, and a counter beside the
first parameter alone. Optimizers that step equal shapes at once, such as nanochat's Muon, keep what belongs to a
whole group beside its first parameter: stacked, one row a parameter. Our own moments that share one tensor are both
seen under their names (`collage_optim.integer_codes.unpacked`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from collage_optim import CollageOptimizer
from collage_optim.integer_codes import unpacked
from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = [
    "StateKey",
    "counts_to",
    "flat_state",
    "keeps_by_name",
    "nested_state",
    "state_of",
    "states_of",
    "step_of",
]

_NOTHING: Final[dict[str, Any]] = {}
_BY_NAME: Final[dict[type, bool]] = {}
"""By class of optimizer: whether all that it keeps is found by name."""
_PLACES: Final[WeakKeyDictionary[Any, dict[int, tuple[int, int]]]] = WeakKeyDictionary()
"""By optimizer: group and place of each of its parameters, by id."""


class StateKey(str):
    """The flat name of an entry that is not kept under that name: `path` leads to it, `stacked` if it is a row."""

    path: tuple[object, ...]
    stacked: bool

    def __new__(cls, path: tuple[object, ...], *, stacked: bool = False) -> StateKey:
        key = super().__new__(cls, ".".join(map(str, path)))
        key.path, key.stacked = path, stacked
        return key


def state_of(optimizer: Any, parameter: Tensor) -> Mapping[str, Any]:
    """The optimizer's state for the parameter; its tensors are the optimizer's own, or views of them. Empty:
    nothing.

    An entry is never made.
    """
    if keeps_by_name(optimizer):
        state: Mapping[str, Any] = optimizer.state.get(parameter, _NOTHING)
        return unpacked(state) if isinstance(optimizer, CollageOptimizer) else state
    return _flat(optimizer, parameter) or _NOTHING


def states_of(optimizer: Any) -> Callable[[Tensor, Mapping[str, Any]], Mapping[str, Any]]:
    """`state_of` for many parameters: called with a parameter and a default."""
    if isinstance(optimizer, CollageOptimizer):
        return lambda parameter, default: unpacked(optimizer.state.get(parameter, default))
    if keeps_by_name(optimizer):
        return optimizer.state.get  # type: ignore[no-any-return]
    return lambda parameter, default: _flat(optimizer, parameter) or default


def keeps_by_name(optimizer: Any) -> bool:
    """Whether all its state is in `state[parameter][name]`, as with torch's optimizers and ours."""
    kind = type(optimizer)
    if kind not in _BY_NAME:
        # Asked for each of maybe 20,000 tensors at the first step.
        _BY_NAME[kind] = issubclass(kind, CollageOptimizer) or kind.__module__.startswith("torch.optim")
    return _BY_NAME[kind]


def _flat(optimizer: Any, parameter: Tensor) -> Mapping[str, Any]:
    group, place = _place_of(optimizer, parameter)
    members = optimizer.param_groups[group]["params"] if group >= 0 else [parameter]
    return flat_state(optimizer.state, members, place)


def flat_state(states: Mapping[Any, Any], members: Sequence[Tensor], place: int) -> Mapping[str, Any]:
    """The state of the parameter at this place of a group, of parameters stepped together."""
    parameter, first = members[place], members[0]
    own: dict[Any, Any] = states.get(parameter, _NOTHING)
    of_first: dict[Any, Any] = states.get(first, _NOTHING)
    if not of_first and not own:
        return _NOTHING
    stacks = [key for key, value in of_first.items() if _is_stack(value, members)]
    if not stacks and not any(type(value) is dict for value in own.values()):
        return own
    flat = dict(_entries(own, (), stacks))
    if place and (own or stacks):
        of_all = (entry for entry in _entries(of_first, (), stacks) if _is_shared(entry[1]))
        flat = {**dict(of_all), **flat}
    for key in stacks:
        flat[StateKey((key,), stacked=True)] = of_first[key][place]
    return flat


def nested_state(flat: Mapping[str, Any]) -> dict[Any, Any]:
    """The state as the optimizer keeps it for this parameter alone, from `flat_state`'s names."""
    state: dict[Any, Any] = {}
    for key, value in flat.items():
        path = key.path if isinstance(key, StateKey) else (key,)
        holder = state
        for name in path[:-1]:
            holder = holder.setdefault(name, {})
        holder[path[-1]] = value.unsqueeze(0) if isinstance(key, StateKey) and key.stacked else value
    return state


def _entries(
    state: Mapping[Any, Any], path: tuple[object, ...], left_out: Sequence[object]
) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if not path and key in left_out:
            continue
        if type(value) is dict:
            yield from _entries(value, (*path, key), ())
        else:
            yield (StateKey((*path, key)) if path or not isinstance(key, str) else key), value


def _is_stack(value: object, members: Sequence[Tensor]) -> bool:
    """Whether a tensor has a row of as many dimensions for each parameter of the group, all of one shape."""
    if not isinstance(value, Tensor) or value.dim() != members[0].dim() + 1 or value.shape[0] != len(members):
        return False
    shape = members[0].shape
    return value.dim() > 1 and all(member.shape == shape for member in members)


def _is_shared(value: object) -> bool:
    """Whether an entry of the first parameter holds for all: a count or a setting, not a tensor of elements."""
    return not isinstance(value, Tensor) or value.numel() == 1


def _place_of(optimizer: Optimizer, parameter: Tensor) -> tuple[int, int]:
    """The parameter's group and its place there; (−1, 0): it is in none."""
    groups = optimizer.param_groups
    group, place = _PLACES.get(optimizer, {}).get(id(parameter), (-1, 0))
    members = groups[group]["params"] if 0 <= group < len(groups) else ()
    if place < len(members) and members[place] is parameter:
        return group, place
    _PLACES[optimizer] = places = {
        id(member): (number, place)
        for number, group in enumerate(groups)
        for place, member in enumerate(group["params"])
    }
    return places.get(id(parameter), (-1, 0))


def counts_to(counter: object) -> int | None:
    """The count at which a counter kept in this tensor's dtype stops; None: it never comes to that."""
    if not isinstance(counter, Tensor) or counter.dtype.itemsize >= 4:
        return None
    dtype = counter.dtype
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def step_of(state: Mapping[str, Any]) -> Any:
    """The count of steps as it is kept, under any mapping; None: there is none."""
    found = state.get("step")
    if found is None:
        nested = (key for key in state if isinstance(key, StateKey) and key.path[-1] == "step")
        found = next((state[key] for key in nested), None)
    return found
