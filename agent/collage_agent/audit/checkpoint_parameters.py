"""The tensors of each parameter: which ones in a checkpoint are weight, averages and low components.

It reads what `checkpoint_files.py` has opened, by the names that each library gives its states, and changes
nothing. The other modules of this package read tensors through it. A library's names are added to the tables at
the top, with a checkpoint of its own in `tests/audit/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from collage_optim import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    Moment,
    StateStorage,
    StorageStrategy,
    known_strategy,
)
from collage_optim.integer_codes import unpacked
from collage_optim.names import dtype_name
from collage_optim.state_loading import OF_WRAPPERS
from collage_optim.tensor_step import component_names
from torch import Tensor

from collage_agent.audit.checkpoint_files import Checkpoint
from collage_agent.sample.quantised_states import reading, reading_dtype

__all__ = [
    "CheckpointParameter",
    "SECOND_MOMENTS",
    "checkpoint_parameters",
    "is_narrow",
    "number_of",
    "place_of",
]

_WEIGHT_LOWS: Final = (PARAMETER_LOW, "kahan_comp", "compensation", "shift", "weight_accounted")
"""Ours, optimi, torchdistx, pytorch_optimizer, and the first public implementation of Collage."""
_MASTERS: Final = (MASTER_PARAMETER, "master_param", "master_weight", "master_params", "fp32_param")
_REMAINDERS: Final = {
    "master_param": "the signed remainder of rounding to nearest",
    "mantissa": "bits appended",
    "error_bits": "a fraction of half a gap",
}
"""How TransformerEngine and Megatron, modded-nanogpt and FlashOptim code their integers."""
_INTEGERS: Final = (torch.int8, torch.uint8, torch.int16, torch.uint16)
_FACTORS: Final = ("_row", "_col", "row_var", "col_var")
"""Suffixes of factored states (rows and columns) in transformers, pytorch_optimizer and torch."""
_TABLES: Final = ("qmap", "absmax")
_NESTED: Final = "__bnb_optimizer_quant_state__"
"""bitsandbytes: what its bytes are read with, and where its state dict keeps both."""
_MATCHES: Final = 0.99
_LOOKED_AT: Final = 2**16
_BUFFERS: Final = ("running_mean", "running_var")
_LOW_SUFFIXES: Final = (LOW_COMPONENT_SUFFIX, "_accounted")
SECOND_MOMENTS: Final = frozenset({"exp_avg_sq", "exp_avg_var", "square_avg", "max_exp_avg_sq", "exp_inf"})


@dataclass(eq=False)
class CheckpointParameter:
    """One parameter: every named tensor has its shape. `averages` are the states without low parts and weights, as
    they are stored; `state` has every tensor of the state but the counter, also those of other shapes.

    paired: whether the weight belongs to the states. Otherwise it is another weight of the same shape: good for
    counting, but its elements may not be compared with a state's.
    """

    name: str
    weight: Tensor | None
    group: Mapping[str, Any] = field(default_factory=dict)
    has_state: bool = False
    step: int | None = None
    counter: Tensor | None = None
    low: Tensor | None = None
    remainder: Tensor | None = None
    remainder_key: str = ""
    master: Tensor | None = None
    averages: dict[str, Tensor] = field(default_factory=dict)
    average_lows: dict[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    paired: bool = True

    @property
    def stepped(self) -> bool:
        """Whether an optimizer of the checkpoint has it."""
        return self.has_state or bool(self.group)

    @property
    def elements(self) -> int:
        """Number of weights."""
        known = self.weight if self.weight is not None else next(iter(self.averages.values()), None)
        return 0 if known is None else known.numel()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor, with its kind."""
        named = {
            "weight": self.weight,
            "low component": self.low,
            "integer remainder": self.remainder,
            "master weight": self.master,
        }
        lows = {f"low component of {name}": tensor for name, tensor in self.average_lows.items()}
        found = {
            label: tensor for label, tensor in {**named, **self.averages, **lows}.items() if tensor is not None
        }
        told = {id(tensor) for tensor in found.values()}
        yield from found.items()
        yield from ((key, tensor) for key, tensor in self.state.items() if id(tensor) not in told)

    def numbers(self, average: str) -> Tensor | None:
        """The stored numbers of an average; floats beside it stay separate."""
        return reading(self.state, average) if average in self.state else self.averages.get(average)

    @property
    def remainder_words(self) -> str:
        """Words for the integer remainder, by its name."""
        return _REMAINDERS.get(self.remainder_key, "bits beyond the weight's")

    @property
    def units_of_gap(self) -> int:
        """How many integers make a gap of the weight, a power of two: one of FlashOptim's form is a little more."""
        return 1 if self.remainder is None else 1 << 8 * self.remainder.dtype.itemsize

    @property
    def declared(self) -> StorageStrategy | None:
        """The strategy that the optimizer's group names, if it is one of ours or of an installed package."""
        return known_strategy(str(self.group.get("strategy")))

    @property
    def betas(self) -> tuple[float, float] | None:
        """The decays of the first and the second moment; None where the group has none, or more than two."""
        given = self.group.get("betas")
        decays = [number_of(beta) for beta in given] if isinstance(given, list | tuple) else []
        if len(decays) != 2 or decays[0] is None or decays[1] is None:
            return None
        return decays[0], decays[1]

    @property
    def second_decay(self) -> float | None:
        """The share of the second moment that decays in a step: 1 − β₂, or RMSprop's 1 − α; None if unknown."""
        if "betas" in self.group:
            return None if self.betas is None else 1 - self.betas[1]
        alpha = number_of(self.group.get("alpha"))
        return None if alpha is None else 1 - alpha

    @property
    def missing(self) -> list[str]:
        """State keys that the declared strategy needs for the averages present, and that are missing."""
        strategy = self.declared
        if strategy is None or not self.has_state or self.weight is None or not is_narrow(self.weight.dtype):
            return []
        averages = tuple(Moment(name, name in SECOND_MOMENTS) for name in self.averages if name not in OF_WRAPPERS)
        there = {
            *self.state,
            *([] if self.low is None and self.remainder is None else [PARAMETER_LOW]),
            *([] if self.master is None else [MASTER_PARAMETER]),
        }
        return [key for key in component_names(strategy, averages) if key not in there]

    @property
    def strategy(self) -> str:
        """The observed strategy, by its name if it has one; "unknown" without states or weight."""
        if self.weight is None or not self.has_state:
            return "unknown"
        if not is_narrow(self.weight.dtype):
            return dtype_name(self.weight.dtype)
        if self.declared is not None and self._is_kept_as(self.declared):
            return self.declared.name
        if self.master is not None:
            return "master-weights"
        if self.remainder is not None:
            return "integer-remainder"
        second_low = any(name in SECOND_MOMENTS for name in self.average_lows)
        first_low = any(name not in SECOND_MOMENTS for name in self.average_lows)
        if self.low is not None:
            return "full" if first_low else "plus" if second_low else "light or kahan"
        wide = [average.dtype.itemsize >= 4 for average in self.averages.values()]
        return "fp32-states" if wide and all(wide) else "plain"

    def _is_kept_as(self, strategy: StorageStrategy) -> bool:
        """Whether the components are those of the strategy."""
        if strategy.is_coded:
            return not self.missing and (self.remainder is None or not self.remainder.is_floating_point())
        component = MASTER_PARAMETER if self.master is not None else None if self.low is None else PARAMETER_LOW
        if component != strategy.parameter_state:
            return False
        seen = {name: self._storage_of(name) for name in self.averages}
        return all(seen[name] is strategy.moment_storage(name in SECOND_MOMENTS) for name in seen)

    def _storage_of(self, average: str) -> StateStorage:
        if average in self.average_lows:
            return StateStorage.PAIR
        return StateStorage.SINGLE if is_narrow(self.averages[average].dtype) else StateStorage.WIDE


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has fewer bits than float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def number_of(option: Any) -> float | None:
    """A group's option as a number; None where it is none."""
    if isinstance(option, int | float) or (isinstance(option, Tensor) and option.numel() == 1):
        return float(option)
    return None


def checkpoint_parameters(checkpoint: Checkpoint) -> tuple[list[CheckpointParameter], list[str]]:
    """Every parameter with its states, and notes on those that could not be matched.

    After the optimizers' parameters come the other weights: frozen ones, buffers, and those whose states were not
    found.
    """
    parameters: list[CheckpointParameter] = []
    notes: list[str] = []
    for number, optimizer in enumerate(checkpoint.optimizers):
        members = list(_members(optimizer))
        names = _names(members, checkpoint.weights, checkpoint.ordered)
        lonely = sum(not paired for _, paired in names)
        if lonely and checkpoint.weights:
            notes.append(
                f"the states of {lonely} of {len(members)} parameters of optimizer {number} could not be matched "
                "with their weights: nothing in the checkpoint says which is which (safetensors and distributed "
                "checkpoints do not keep the model's order); build the optimizer from model.named_parameters(), "
                "then it keeps the names"
            )
        for (name, paired), (label, group, state) in zip(names, members, strict=True):
            weight = None if name is None else checkpoint.weights[name]
            parameters.append(_parameter(name if name and paired else label, weight, group, state, paired=paired))
    found = {place_of(entry.weight) for entry in parameters if entry.weight is not None}
    parameters += [
        CheckpointParameter(name, weight)
        for name, weight in _parameters_of(checkpoint.weights).items()
        if place_of(weight) not in found
    ]
    return parameters, notes


def _parameters_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point tensors; a tied weight once, under its first name; no running statistics."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, int, torch.Size]] = set()
    for name, tensor in weights.items():
        if tensor.is_floating_point() and place_of(tensor) not in seen and not name.endswith(_BUFFERS):
            seen.add(place_of(tensor))
            found[name] = tensor
    return found


def place_of(tensor: Tensor) -> tuple[int, int, torch.Size]:
    """A tensor's place in memory, the same for tied weights."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape


def _members(optimizer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Label, group and state of each parameter, in the optimizer's order."""
    for index, group in enumerate(optimizer["param_groups"]):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        given = group.get("param_names")
        for position, key in enumerate(group["params"]):
            label = str(given[position]) if given else key if isinstance(key, str) else f"group{index}.{position}"
            # A distributed checkpoint makes numbers in paths into text.
            state = optimizer["state"].get(key, optimizer["state"].get(str(key), {}))
            state = state if isinstance(state, Mapping) else {}
            nested = state.get(_NESTED, {})
            yield label, options, {**{name: value for name, value in state.items() if name != _NESTED}, **nested}


def _names(
    members: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]],
    weights: Mapping[str, Tensor],
    ordered: bool,
) -> list[tuple[str | None, bool]]:
    """The weight's name for each member: by label, otherwise among weights of the same shape if the match is
    certain.

    It is sure by order if the weights are in the model's (`ordered`), as optimizers keep it within a group, all
    parameters of the shape are in one group, and are as many as the model's tensors of that shape. Elsewhere it is
    sure if there is one of the shape (left), or if a master weight rounds to one of them and to no other. Members
    whose states do not tell a shape are the weights that are left, by order, where that holds for all of these.
    False: not sure.
    """
    if all(label in weights for label, _, _ in members):
        return [(label, True) for label, _, _ in members]
    by_shape: dict[torch.Size, list[str]] = {}
    for name, weight in _parameters_of(weights).items():
        by_shape.setdefault(weight.shape, []).append(name)
    places: dict[torch.Size, list[int]] = {}
    groups: dict[torch.Size, set[int]] = {}
    for place, (_, group, state) in enumerate(members):
        if (shape := _shape_of(state)) is not None:
            places.setdefault(shape, []).append(place)
            groups.setdefault(shape, set()).add(id(group))
    names: list[tuple[str | None, bool]] = [(None, False)] * len(members)
    for shape, found in places.items():
        candidates = by_shape.get(shape, [])
        if len(candidates) == len(found) and (len(found) == 1 or (ordered and len(groups[shape]) == 1)):
            for place, name in zip(found, candidates, strict=True):
                names[place] = name, True
            continue
        rounded = [
            [name for name in candidates if _is_rounded(members[place][2], weights[name])] for place in found
        ]
        sure = [alike[0] if len(alike) == 1 and rounded.count(alike) == 1 else None for alike in rounded]
        others = [name for name in candidates if name not in sure]
        for place, certain in zip(found, sure, strict=True):
            if certain is not None:
                names[place] = certain, True
            elif len(candidates) == len(found):
                # If one weight and one member are left over, they belong together.
                names[place] = others.pop(0), sure.count(None) == 1
    rest = [place for place, (_, _, state) in enumerate(members) if _shape_of(state) is None]
    taken = {name for name, _ in names}
    left = [name for name in _parameters_of(weights) if name not in taken]
    if ordered and len(left) == len(rest) and len({id(members[place][1]) for place in rest}) == 1:
        for place, name in zip(rest, left, strict=True):
            names[place] = name, True
    return names


def _is_rounded(state: Mapping[str, Any], weight: Tensor) -> bool:
    """Whether the state has a master weight that rounds to the weight nearly everywhere, judged by a sample."""
    masters = (state[key] for key in _MASTERS if isinstance(state.get(key), Tensor))
    return any(
        master.dtype.itemsize > weight.dtype.itemsize
        and float((_part(master).to(weight.dtype) == _part(weight)).double().mean()) > _MATCHES
        for master in masters
        if master.shape == weight.shape
    )


def _part(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:_LOOKED_AT]


def _shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    """The weight's shape, which is the largest of its states; None where those keep only rows and columns of it."""
    shapes = {
        str(key): value.shape
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step" and not str(key).startswith(_TABLES)
    }
    largest = max(shapes, key=lambda key: shapes[key].numel(), default=None)
    return None if largest is None or largest.endswith(_FACTORS) else shapes[largest]


def _parameter(
    name: str, weight: Tensor | None, group: Mapping[str, Any], state: Mapping[str, Any], *, paired: bool
) -> CheckpointParameter:
    shape, state = weight.shape if weight is not None else _shape_of(state), unpacked(state)
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor) and key != "step"}
    entry = CheckpointParameter(
        name, weight, group, bool(state), _step(state.get("step")), state=tensors, paired=paired
    )
    entry.counter = state["step"] if isinstance(state.get("step"), Tensor) else None
    # Our own integers are what the strategy says, even if they look like remainders.
    coded = entry.declared if entry.declared is not None and entry.declared.is_coded else None
    for key, value in tensors.items():
        if value.shape != shape:
            continue
        if _is_remainder(key, value) if coded is None else key == PARAMETER_LOW and coded.parameter.is_split:
            entry.remainder, entry.remainder_key = value, key
        elif coded is None and not reading_dtype(tensors, key).is_floating_point:
            continue
        elif key in _WEIGHT_LOWS:
            entry.low = value
        elif key in _MASTERS:
            entry.master = value
        elif (whole := _whole(key, state)) is not None:
            entry.average_lows[whole] = value
        else:
            entry.averages[key] = value
    return entry


def _is_remainder(key: str, value: Tensor) -> bool:
    """Whether a state of the weight's shape is an integer remainder: by name, or by 16 bits; cast ones too."""
    if value.dtype in (torch.int16, torch.uint16):
        return True
    if key not in _REMAINDERS or value.dtype.itemsize > 2:
        return False
    if value.dtype in _INTEGERS:
        return True
    return bool((value == value.round()).all()) and bool((value.abs() > 1).any())


def _whole(key: str, state: Mapping[str, Any]) -> str | None:
    """The state of which `key` is the low part."""
    for suffix in _LOW_SUFFIXES:
        if key.endswith(suffix) and key.removesuffix(suffix) in state:
            return key.removesuffix(suffix)
    return None


def _step(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return int(value.max().item()) if value.numel() else None
    return value if isinstance(value, int) else None
