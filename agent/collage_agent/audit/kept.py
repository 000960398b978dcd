"""What is kept of each parameter: which tensors of a checkpoint are weight, averages and low components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from collage_agent.audit.reading import Checkpoint
from collage_agent.optim import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    StateStorage,
    StorageStrategy,
    known_strategy,
)

__all__ = ["SECOND_MOMENTS", "KeptParameter", "dtype_name", "is_narrow", "kept_parameters"]

_WEIGHT_LOWS: Final = (PARAMETER_LOW, "kahan_comp", "compensation", "shift", "weight_accounted")
"""Ours, optimi, torchdistx, pytorch_optimizer, and the first public implementation of Collage."""
_MASTERS: Final = (MASTER_PARAMETER, "master_param", "master_weight", "master_params", "fp32_param")
_BUFFERS: Final = ("running_mean", "running_var")
_LOW_SUFFIXES: Final = (LOW_COMPONENT_SUFFIX, "_accounted")
SECOND_MOMENTS: Final = frozenset({"exp_avg_sq", "exp_avg_var", "square_avg", "max_exp_avg_sq", "exp_inf"})


@dataclass(eq=False)
class KeptParameter:
    """One parameter: every tensor has its shape. `averages` are the states without low parts and weights."""

    name: str
    weight: Tensor | None
    group: Mapping[str, Any] = field(default_factory=dict)
    has_state: bool = False
    step: int | None = None
    low: Tensor | None = None
    master: Tensor | None = None
    averages: dict[str, Tensor] = field(default_factory=dict)
    average_lows: dict[str, Tensor] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Number of weights."""
        known = self.weight if self.weight is not None else next(iter(self.averages.values()), None)
        return 0 if known is None else known.numel()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is kept, with what it is."""
        named = {"weight": self.weight, "low component": self.low, "master weight": self.master}
        yield from ((label, tensor) for label, tensor in named.items() if tensor is not None)
        yield from self.averages.items()
        yield from ((f"low component of {name}", tensor) for name, tensor in self.average_lows.items())

    @property
    def declared(self) -> StorageStrategy | None:
        """The strategy that the optimizer's group names, if it is one of ours or of an installed package."""
        return known_strategy(str(self.group.get("strategy")))

    @property
    def strategy(self) -> str:
        """How it is seen to be kept, as a strategy's name where it is one; "unknown" without states or weight."""
        if self.weight is None or not self.has_state:
            return "unknown"
        if not is_narrow(self.weight.dtype):
            return dtype_name(self.weight.dtype)
        if self.declared is not None and self._is_kept_as(self.declared):
            return self.declared.name
        if self.master is not None:
            return "master-weights"
        second_low = any(name in SECOND_MOMENTS for name in self.average_lows)
        first_low = any(name not in SECOND_MOMENTS for name in self.average_lows)
        if self.low is not None:
            return "full" if first_low else "plus" if second_low else "light or kahan"
        wide = [not is_narrow(average.dtype) for average in self.averages.values()]
        return "fp32-states" if wide and all(wide) else "plain"

    def _is_kept_as(self, strategy: StorageStrategy) -> bool:
        """Whether the components are those of the strategy."""
        component = MASTER_PARAMETER if self.master is not None else None if self.low is None else PARAMETER_LOW
        if component != strategy.parameter_state:
            return False
        seen = {name: self._storage_of(name) for name in self.averages}
        return all(seen[name] is strategy.kept(name in SECOND_MOMENTS) for name in seen)

    def _storage_of(self, average: str) -> StateStorage:
        if average in self.average_lows:
            return StateStorage.PAIR
        return StateStorage.SINGLE if is_narrow(self.averages[average].dtype) else StateStorage.WIDE


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has fewer bits than float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def kept_parameters(checkpoint: Checkpoint) -> tuple[list[KeptParameter], list[str]]:
    """Every parameter with its states, and notes on what could not be put together."""
    kept: list[KeptParameter] = []
    notes: list[str] = []
    for number, optimizer in enumerate(checkpoint.optimizers):
        members = list(_members(optimizer))
        names = _names(members, checkpoint.weights)
        lonely = names.count(None)
        if lonely and checkpoint.weights:
            notes.append(
                f"the states of {lonely} of {len(members)} parameters of optimizer {number} could not be matched "
                "with their weights: nothing in the checkpoint says which is which; build the optimizer from "
                "model.named_parameters(), then it keeps the names"
            )
        for name, (label, group, state) in zip(names, members, strict=True):
            kept.append(_kept(name or label, None if name is None else checkpoint.weights[name], group, state))
    if not any(entry.weight is not None for entry in kept):
        # With states at hand, tensors that no optimizer steps are buffers and frozen weights.
        kept += [KeptParameter(name, weight) for name, weight in _parameters_of(checkpoint.weights).items()]
    return kept, notes


def _parameters_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point tensors; a tied weight once, under its first name; no running statistics."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, int, torch.Size]] = set()
    for name, tensor in weights.items():
        key = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape)
        if tensor.is_floating_point() and key not in seen and not name.endswith(_BUFFERS):
            seen.add(key)
            found[name] = tensor
    return found


def _members(optimizer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Label, group and state of each parameter, in the optimizer's order."""
    for index, group in enumerate(optimizer["param_groups"]):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        given = group.get("param_names")
        for position, key in enumerate(group["params"]):
            label = str(given[position]) if given else key if isinstance(key, str) else f"group{index}.{position}"
            state = optimizer["state"].get(key, {})
            yield label, options, state if isinstance(state, Mapping) else {}


def _names(
    members: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]], weights: Mapping[str, Tensor]
) -> list[str | None]:
    """The weight's name for each member: by label, else by order among those of one shape, where that is sure.

    Optimizers keep the model's order within a group. It is sure if all parameters of the shape are in one group,
    and are as many as the model's tensors of that shape.
    """
    if all(label in weights for label, _, _ in members):
        return [label for label, _, _ in members]
    by_shape: dict[torch.Size, list[str]] = {}
    for name, weight in _parameters_of(weights).items():
        by_shape.setdefault(weight.shape, []).append(name)
    places: dict[torch.Size, list[int]] = {}
    groups: dict[torch.Size, set[int]] = {}
    for place, (_, group, state) in enumerate(members):
        if (shape := _shape_of(state)) is not None:
            places.setdefault(shape, []).append(place)
            groups.setdefault(shape, set()).add(id(group))
    names: list[str | None] = [None] * len(members)
    for shape, found in places.items():
        candidates = by_shape.get(shape, [])
        if len(groups[shape]) == 1 and len(candidates) == len(found):
            for place, name in zip(found, candidates, strict=True):
                names[place] = name
    return names


def _shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    shapes = [value.shape for key, value in state.items() if isinstance(value, Tensor) and key != "step"]
    return max(shapes, key=lambda shape: shape.numel(), default=None)


def _kept(name: str, weight: Tensor | None, group: Mapping[str, Any], state: Mapping[str, Any]) -> KeptParameter:
    shape = weight.shape if weight is not None else _shape_of(state)
    entry = KeptParameter(name, weight, group, has_state=bool(state), step=_step(state.get("step")))
    for key, value in state.items():
        if not isinstance(value, Tensor) or key == "step" or value.shape != shape or not value.is_floating_point():
            continue
        if key in _WEIGHT_LOWS:
            entry.low = value
        elif key in _MASTERS:
            entry.master = value
        elif (whole := _whole(key, state)) is not None:
            entry.average_lows[whole] = value
        else:
            entry.averages[str(key)] = value
    return entry


def _whole(key: str, state: Mapping[str, Any]) -> str | None:
    """The state of which `key` is the low part."""
    for suffix in _LOW_SUFFIXES:
        if str(key).endswith(suffix) and str(key).removesuffix(suffix) in state:
            return str(key).removesuffix(suffix)
    return None


def _step(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return int(value.max().item()) if value.numel() else None
    return value if isinstance(value, int) else None
