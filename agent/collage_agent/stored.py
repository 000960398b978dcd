"""What a strategy keeps: which tensors make up the stored weight and the stored moving averages of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.optim import LOW_COMPONENT_SUFFIX, MASTER_PARAMETER, PARAMETER_LOW, CollageOptimizer

__all__ = [
    "GRADIENT",
    "PARAMETER",
    "average_names",
    "components",
    "decaying",
    "elementwise_state",
    "observed_strategy",
    "scalar_state",
    "stored_parameter",
]

PARAMETER: Final = "registered parameter"
GRADIENT: Final = "gradient"
_SCALARS_OF_TORCH: Final = frozenset({"step", "mu_product", "mu", "eta"})
_RUNNING_MAXIMA: Final = frozenset({"max_exp_avg_sq"})


def elementwise_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of an optimizer's state that hold one value for each element of the parameter.

    By shape; torch's scalars are told apart by name, for a parameter without dimensions.
    """
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and key not in _SCALARS_OF_TORCH
    }


def scalar_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The other entries: step counters and whatever is kept once for the whole tensor."""
    elementwise = elementwise_state(parameter, state)
    return {key: value for key, value in state.items() if key not in elementwise}


def components(name: str, keys: Iterable[str], *, joined: bool) -> list[str]:
    """Keys whose values add up to what is kept under `name`; `joined` is True for our own optimizers."""
    low = name + LOW_COMPONENT_SUFFIX
    return [name, low] if joined and low in keys else [name]


def stored_parameter(keys: Iterable[str], *, joined: bool) -> list[str]:
    """Keys whose values add up to the stored weight: p, p + low component, or the master weight."""
    present = set(keys)
    if joined and MASTER_PARAMETER in present:
        return [MASTER_PARAMETER]
    return [PARAMETER, PARAMETER_LOW] if joined and PARAMETER_LOW in present else [PARAMETER]


def average_names(keys: Iterable[str], *, joined: bool) -> list[str]:
    """Names of the kept averages among `keys`: no weights, no low components of their own."""
    kept = [key for key in keys if key not in (PARAMETER, GRADIENT)]
    if not joined:
        return kept
    weights = (PARAMETER_LOW, MASTER_PARAMETER)
    lows = {key + LOW_COMPONENT_SUFFIX for key in kept}
    return [key for key in kept if key not in weights and key not in lows]


def decaying(name: str, tensor_dtype: torch.dtype) -> bool:
    """Whether a kept average can be judged by its decrements: a float, and no running maximum."""
    return tensor_dtype.is_floating_point and name not in _RUNNING_MAXIMA


def observed_strategy(optimizer: Optimizer) -> str:
    """What the optimizer is seen to keep, as a strategy's name; "unknown" for classes that are not known here."""
    if isinstance(optimizer, CollageOptimizer):
        names = {str(group["strategy"]) for group in optimizer.param_groups}
        return names.pop() if len(names) == 1 else "unknown"
    if not type(optimizer).__module__.startswith("torch.optim"):
        return "unknown"
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and isinstance(state, dict):
            floats = [
                value.dtype for value in elementwise_state(parameter, state).values() if value.is_floating_point()
            ]
            if floats and parameter.dtype.itemsize < 4 and all(dtype.itemsize >= 4 for dtype in floats):
                return "fp32-states"
    return "plain"
