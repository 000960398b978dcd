"""The composition of a strategy: which tensors make up the stored weight and the stored moving averages of a
parameter.

`collage_agent.intent` finds a `Composition` by watching a clone, or takes `OURS`; `collage_agent.step.layout`
decides by it what is gathered.

Names of states that our own and other libraries use stand here and nowhere else in measuring
(`tests/agent/intent/test_observed_storage.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from collage_optim import LOW_COMPONENT_SUFFIX, MASTER_PARAMETER, PARAMETER_LOW, SCALE_SUFFIX
from collage_optim.numerics.formats import gap_towards
from collage_optim.strategies import PACKED_FIRST
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.nn import Parameter

from collage_agent.sample.quantised_states import completes_another, is_quantised, reading_dtype
from collage_agent.sample.remainder_codes import SIGNED_BITS, SIGNED_BYTE, RemainderCode

__all__ = [
    "Composition",
    "GRADIENT",
    "OURS",
    "PARAMETER",
    "PLAIN",
    "PLAIN_TENSORS",
    "average_names",
    "components",
    "decaying",
    "elementwise_dtypes",
    "elementwise_state",
    "factored_state",
    "form_of",
    "leaves_residual",
    "scalar_state",
    "stored_parameter",
]

PARAMETER: Final = "registered parameter"
GRADIENT: Final = "gradient"
_SCALARS_OF_TORCH: Final = frozenset({"step", "mu_product", "mu", "eta"})
_RUNNING_MAXIMA: Final = frozenset({"max_exp_avg_sq"})
PLAIN_TENSORS: Final = {Tensor, Parameter}
_PARTS_OF_GAP: Final = 4


@dataclass(frozen=True)
class Composition:
    """The keys of the states that make up the stored weight, and of those that complete an average.

    residual: is added to the registered parameter; `sign` −1: the optimizer subtracts it, so that it is negated
    where it is read. code: how a residual that is kept as integers is read, and `counts` their dtype; None: it is
    kept as floats. master: is the stored weight by itself. low_suffix: an average's key with it is its low
    component. If a tensor lacks a key, that part is left out. gradient: the attribute of a parameter that holds the
    gradient which is stepped. sparse: only sparse gradients are. decays_apart: weight decay is an operation of its
    own, rounded to the weight's dtype, whatever is kept beside it. growing: states that only sum up.
    """

    residual: str | None = None
    sign: int = 1
    master: str | None = None
    low_suffix: str | None = None
    code: RemainderCode | None = None
    counts: torch.dtype = torch.int16
    gradient: Literal["grad", "decoupled_grad"] = "grad"
    sparse: bool = False
    decays_apart: bool = field(default=False, compare=False)
    growing: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether the registered parameter is the whole stored weight."""
        return self.residual is None and self.master is None

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The gradient that the optimizer steps by; None where there is none."""
        found: Tensor | None = getattr(parameter, self.gradient, None)
        return found

    def give(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Set the whole gradient on a clone's parameter, in the attribute that the optimizer reads."""
        if self.sparse and gradient is not None:
            places = torch.ones_like(gradient, dtype=torch.bool).nonzero().t()
            gradient = torch.sparse_coo_tensor(
                places, gradient.reshape(-1), gradient.shape, check_invariants=False, is_coalesced=True
            )
        setattr(parameter, self.gradient, gradient)

    def residual_of(self, weight: Tensor, value: Tensor) -> Tensor:
        """r = θ − p of the same shape, from p and what the residual's key holds. No synchronisation.

        fp64, or fp32 where that holds it.
        """
        if self.code is None or not self.holds_counts(value.dtype):
            return value.to(torch.float64) * self.sign
        found = self.code_in(value.dtype).residual(weight, value)
        return found if self.sign > 0 else found.neg_()

    def rounds_once(self, weight: torch.dtype, residual: torch.dtype) -> bool:
        """Whether torch's cast of p + r from fp64 to p's dtype, which goes through fp32, rounds as one step would.

        It does for an fp32 number, and for the sum of two numbers of a 16-bit dtype: fp32 has twice their digits
        and two more (Figueroa, "When is double rounding innocuous?", 1995).
        """
        if self.code is None or not self.holds_counts(residual):
            return residual == weight
        return self.sign > 0 and self.code_in(residual).appends_bits(weight)

    def code_in(self, integers: torch.dtype) -> RemainderCode:
        """The meaning of these integers: ours keep one byte under the same key as two. Needs a code."""
        assert self.code is not None
        return SIGNED_BYTE if self.code is SIGNED_BITS and integers == torch.int8 else self.code

    def holds_counts(self, dtype: torch.dtype) -> bool:
        """Whether a residual of this dtype holds integers: also those that loading a checkpoint has cast to floats.

        Ours are not cast: there one strategy keeps floats under the key, and another integers.
        """
        cast = self.low_suffix is None and dtype.is_floating_point
        return self.code is not None and (cast or not dtype.is_floating_point)


PLAIN: Final = Composition()
OURS: Final = Composition(PARAMETER_LOW, 1, MASTER_PARAMETER, LOW_COMPONENT_SUFFIX, SIGNED_BITS)


def elementwise_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of an optimizer's state that hold one value for each element of the parameter.

    Found by shape; for a parameter without dimensions, torch's scalars are excluded by name.
    """
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.shape == parameter.shape
        and key not in _SCALARS_OF_TORCH
        and not completes_another(state, key)
    }


def factored_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries that hold one value for each row or column: the parameter's shape but for one dimension.

    Scales of quantised states may have that shape, and are left out with all else of such a state.
    """
    shape = tuple(parameter.shape)
    quantised = (
        is_quantised(local_part(value)) or reading_dtype(state, key) != value.dtype
        for key, value in elementwise_state(parameter, state).items()
    )
    if len(shape) < 2 or any(quantised):
        return {}
    dropped = {shape[:axis] + shape[axis + 1 :] for axis in range(len(shape))}
    kept = {(*shape[:axis], 1, *shape[axis + 1 :]) for axis in range(len(shape)) if shape[axis] != 1}
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) in dropped | kept
    }


def scalar_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The other entries: step counters and other values kept once for the whole tensor."""
    elementwise = elementwise_state(parameter, state)
    return {key: value for key, value in state.items() if key not in elementwise}


def elementwise_dtypes(parameter: Tensor, state: Mapping[str, Any]) -> tuple[tuple[str, torch.dtype], ...]:
    """(key, dtype it is read in) of each elementwise state: tensors stepped alike agree in them."""
    return tuple((key, reading_dtype(state, key)) for key in elementwise_state(parameter, state))


def form_of(parameter: Tensor, state: Mapping[str, Any]) -> object:
    """A key for how a state is read: equal for parameters whose states have the same keys, classes and dtypes, and
    the same entries of the parameter's shape or of more than one number."""
    shape, found = parameter.shape, list[object]()
    for key, value in state.items():
        kind = type(value)
        if kind is Tensor:
            found += (key, value.dtype, value.shape == shape, value.numel() > 1)
        elif isinstance(value, Tensor):
            found += (key, value.dtype, value.shape == shape, value.numel() > 1, kind, type(local_part(value)))
        else:
            found += (key, kind)
    return tuple(found)


def components(name: str, keys: Iterable[str], composition: Composition) -> list[str]:
    """Keys whose values add up to the state `name`."""
    low = name + composition.low_suffix if composition.low_suffix else None
    return [name] if low is None or low not in keys else [name, low]


def stored_parameter(keys: Iterable[str], composition: Composition) -> list[str]:
    """Keys whose values add up to the stored weight: p, p + residual, or the master weight."""
    present = set(keys)
    if composition.master in present:
        return [str(composition.master)]
    return [PARAMETER] if composition.residual not in present else [PARAMETER, str(composition.residual)]


def average_names(keys: Iterable[str], composition: Composition) -> list[str]:
    """Names of the averages among `keys`, without weights and low components."""
    names = [key for key in keys if key not in (PARAMETER, GRADIENT, composition.residual, composition.master)]
    if composition.low_suffix is None:
        return names
    lows = {key + composition.low_suffix for key in names}
    return [key for key in names if key not in lows]


def decaying(state: Mapping[str, Any], name: str) -> bool:
    """Whether a kept average can be judged by its decrements: a float, and no running maximum.

    Nor one that takes what the weight's rounding left (`collage_optim.coupling`): ours in signed codes with scales.
    """
    signed = state[name].dtype == torch.int8 or (state[name].dtype == torch.int16 and name == PACKED_FIRST)
    coupled = signed and name + SCALE_SUFFIX in state
    return reading_dtype(state, name).is_floating_point and name not in _RUNNING_MAXIMA and not coupled


def leaves_residual(update: Tensor, weight: Tensor) -> Tensor:
    """bool, one for each element: whether a residual of 0 is strange where such updates are added to a weight.

    update: fp64; weight: as many, in their own dtype. No synchronisation.

    It is not where the update is a whole number of quarters of the weight's gap, as Lion's may be at a rate that is
    a power of two. Then a residual has few values, and 0 is one of them; after updates by whole gaps, the only one.
    """
    quarters = update / gap_towards(weight, update) * _PARTS_OF_GAP
    return quarters.round().ne(quarters)
