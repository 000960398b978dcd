"""Describes the state that an optimizer keeps for the tensors of a bucket: which entries are weights or averages.

A layout is made when steps are planned; a step only looks it up. A new kind of state is described here once, and
gathering, observing and oracles follow. Beside it: what counters and groups say about a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from collage_optim import RESIDUALS_FROM, CollageAdam, CollageAdamW, CollageLion
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.sample import stored_parts
from collage_agent.sample.quantised_states import is_read_as_kept, own_parts, reading_dtype
from collage_agent.sample.state_mappings import step_of
from collage_agent.sample.stored_parts import PARAMETER, Composition

__all__ = [
    "Average",
    "KeptState",
    "StateLayout",
    "StepLayout",
    "decoupled_rate",
    "differing_counters",
    "out_of_lock_step",
    "stepped_since_kept",
]

_FEW_STEPS: Final = 10
"""After this many random steps to and fro, a quarter of the elements are back where they began."""
_ALWAYS_DECOUPLED: Final = (torch.optim.AdamW, CollageAdamW, CollageLion)


@dataclass(frozen=True)
class KeptState:
    """A state with one value for each element, and how its sample becomes numbers of `dtype`.

    plain: the tensor is gathered as it is. parts: our own optimizers keep codes under these keys, which are
    gathered, then decoded. With neither, the whole tensor is decoded first. completes: the gathered values encode
    the weight's residual and are decoded beside the weight.
    """

    key: str
    dtype: torch.dtype
    plain: bool
    parts: tuple[str, ...]
    completes: bool


@dataclass(frozen=True)
class Average:
    """A moving average, or a sum over the steps: the sum of the values under these keys."""

    name: str
    components: tuple[str, ...]
    is_float: bool
    is_decaying: bool
    is_growing: bool


@dataclass(frozen=True)
class StateLayout:
    """The role of each entry of the state, the same for all tensors of a bucket.

    weights: elementwise states that are part of the stored weight; others: all other elementwise states. scalars:
    entries kept once for a whole tensor. stored: the keys whose values add up to the stored weight. form: keys,
    classes and dtypes, by which `fits` recognises a state.
    """

    form: tuple[object, ...]
    weights: tuple[KeptState, ...]
    others: tuple[KeptState, ...]
    scalars: tuple[str, ...]
    stored: tuple[str, ...]
    averages: tuple[Average, ...]
    rounds_once_to: torch.dtype | None

    @classmethod
    def of(cls, parameter: Tensor, state: Mapping[str, Any], composition: Composition) -> StateLayout:
        """Make the layout of a bucket from the state of one of its tensors."""
        elementwise = stored_parts.elementwise_state(parameter, state)
        keys = (PARAMETER, *elementwise)
        stored = tuple(stored_parts.stored_parameter(keys, composition))
        kept = {key: _kept(state, key, composition) for key in elementwise}
        parts = {part for entry in kept.values() for part in entry.parts}
        averages = tuple(
            Average(
                name,
                components=tuple(stored_parts.components(name, keys, composition)),
                is_float=kept[name].dtype.is_floating_point,
                is_decaying=stored_parts.decaying(state, name) and name not in composition.growing,
                is_growing=stored_parts.decaying(state, name) and name in composition.growing,
            )
            for name in stored_parts.average_names(keys, composition)
        )
        return cls(
            form=_form_of(state),
            weights=tuple(entry for key, entry in kept.items() if key in stored),
            others=tuple(entry for key, entry in kept.items() if key not in stored),
            scalars=tuple(key for key in state if key not in elementwise and key not in parts),
            stored=stored,
            averages=averages,
            rounds_once_to=_rounds_once_to(parameter.dtype, [kept[key].dtype for key in stored[1:]], composition),
        )

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state has this layout: the same keys, classes and dtypes."""
        return self.form == _form_of(state)

    @cached_property
    def kept(self) -> tuple[KeptState, ...]:
        """All elementwise states, those of the weight first."""
        return self.weights + self.others

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of the gathered tensors: the registered parameter and the elementwise states."""
        return (PARAMETER, *(entry.key for entry in self.kept))

    @cached_property
    def weight_keys(self) -> tuple[str, ...]:
        """Keys of the weight's components, visible and stored."""
        return (PARAMETER, *(entry.key for entry in self.weights))

    @cached_property
    def is_sum(self) -> bool:
        """Whether the stored weight is the registered one plus another part."""
        return self.stored[0] == PARAMETER and len(self.stored) > 1


@dataclass(frozen=True)
class StepLayout:
    """The layouts before a step and after it, which differ at an optimizer's first step: it makes the states."""

    before: StateLayout
    after: StateLayout

    @cached_property
    def averages(self) -> tuple[Average, ...]:
        """The averages kept as floats before the step, which are compared with exact arithmetic."""
        return tuple(entry for entry in self.before.averages if entry.is_float)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of `averages`, in order."""
        return tuple(entry.name for entry in self.averages)

    @cached_property
    def decaying(self) -> tuple[str, ...]:
        """Names of averages that can be judged by how they shrink: those of `names`, and new ones."""
        return self._judged([entry.name for entry in self.after.averages if entry.is_decaying])

    @cached_property
    def growing(self) -> tuple[str, ...]:
        """Names of sums, which are judged by how they grow: those of `names`, and new ones."""
        return self._judged([entry.name for entry in self.after.averages if entry.is_growing])

    def _judged(self, names: Sequence[str]) -> tuple[str, ...]:
        before = {entry.name for entry in self.before.averages}
        return tuple(name for name in names if name in self.names or name not in before)

    @cached_property
    def present(self) -> dict[str, tuple[str, ...]]:
        """Names of averages that still exist after the step, with their components then."""
        after = {entry.name: entry.components for entry in self.after.averages}
        return {name: after[name] for name in self.names if name in after}

    @cached_property
    def is_visible(self) -> bool:
        """Whether only the registered parameter is stored, so that eᵛ is e."""
        return self.after.stored == (PARAMETER,)


def _rounds_once_to(
    weight: torch.dtype, residuals: Sequence[torch.dtype], composition: Composition
) -> torch.dtype | None:
    return weight if any(composition.rounds_once(weight, residual) for residual in residuals) else None


def _form_of(state: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple([(key, type(value), getattr(value, "dtype", None)) for key, value in state.items()])


def _kept(state: Mapping[str, Any], key: str, composition: Composition) -> KeptState:
    dtype = reading_dtype(state, key)
    completes = key == composition.residual and (composition.sign < 0 or composition.holds_counts(dtype))
    return KeptState(key, dtype, is_read_as_kept(state, key), own_parts(state, key), completes)


def out_of_lock_step(states: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """bool [tensors]: which step counters differ from the first; None if counters are on the host.

    By counters on the host, tensors were put into different buckets. Those on a device cannot be read without
    synchronising it; the shadow steps a tensor that missed a step with a wrong counter, so it is not reported.
    """
    counters = []
    for state in states:
        step = state["step"] if "step" in state else step_of(state)
        if not isinstance(step, Tensor) or step.is_cpu:
            return None
        counters.append(step.reshape(()))
    return differing_counters(counters)


def differing_counters(counters: Sequence[Tensor]) -> Tensor:
    """bool [n]: which of n counters [()] differ from the first. No synchronisation."""
    stacked = torch.stack(list(counters))
    return stacked.ne(stacked[0])


def decoupled_rate(optimizer: Optimizer, group: dict[str, Any], *, apart: bool = False) -> float | Tensor | None:
    """lr·λ of a parameter group, a tensor if the learning rate is on a device; None: coupled, or not known.

    Torch marks the group with `decoupled_weight_decay`; of unmarked classes ours are known, and those that were
    seen to decay `apart`. Reads tensors on the host only, so nothing is synchronised.
    """
    always = apart or (isinstance(optimizer, _ALWAYS_DECOUPLED) and not isinstance(optimizer, CollageAdam))
    if not group.get("decoupled_weight_decay", always):
        return None
    rate, decay = _number(group.get("lr")), _number(group.get("weight_decay"))
    return None if rate is None or decay is None else rate * decay


def _number(value: Any) -> float | Tensor | None:
    if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
        return float(value)
    return value if isinstance(value, Tensor | float | int) else None


def stepped_since_kept(group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[bool | Tensor, bool | Tensor]:
    """(whether a tensor took a step that could leave a residual, whether few even steps may have cancelled it), as
    bools or bool [()] on the counter's device.

    Our optimizers record since when residuals are kept. In others the first step may have had a rate of 0.
    """
    count, since = step_of(state), group.get(RESIDUALS_FROM, 1)
    count = group.get("step") if count is None else count
    if count is None:
        return True, False
    on_device = isinstance(count, Tensor) and not count.is_cpu
    count = count.reshape(-1)[0] if on_device else int(count)
    taken = count - int(group.get(RESIDUALS_FROM, 0))
    few = (taken < _FEW_STEPS) & (taken % 2 == 0)
    return count > since, few
