"""Averages of the weights: their tensors and classes, the calls that update them, and the decay.

`watching/` finds averages by these calls. Averages of torch and other libraries are known only if listed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from collage_optim.names import dtype_name, plain_name
from collage_optim.tensor_step import local_part
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from collage_agent.training.dtensors import mesh_shard

__all__ = ["AveragedTensor", "Share", "averaged", "averages_now", "method_of", "share_of"]

Share = float | Tensor | None
"""1 − decay of one update, a tensor [()] where a device alone knows it; None: not known."""
_FORMS: Final = (
    "pass an AveragedModel, an EMAModel, a copy of the model, or its averaged tensors by name or in order"
)


@dataclass(frozen=True)
class AveragedTensor:
    """A weight and its average, under the layer's name.

    key: where a mapping or a sequence holds the average. shard: which one of the tensor this rank holds.
    """

    name: str
    weight: Tensor
    average: Tensor
    key: str | int
    shard: int = 0

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that tensors gathered together share."""
        weight, average = local_part(self.weight), local_part(self.average)
        return weight.device, weight.dtype, average.device, average.dtype, type(self.weight), type(self.average)


def method_of(average: object) -> str | None:
    """The method that updates the average, if its class is a known one or similar."""
    if isinstance(average, AveragedModel):
        return "update_parameters"
    if hasattr(average, "shadow_params") and callable(getattr(average, "step", None)):
        return "step"
    if _module_in(average) is not None and callable(getattr(average, "update", None)):
        return "update"
    return None


def _module_in(average: object) -> nn.Module | None:
    """The averaged module inside torch's and timm's classes."""
    found = getattr(average, "module", getattr(average, "ema", None))
    return found if isinstance(found, nn.Module) else None


def share_of(average: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Share:
    """1 − decay of the current update; None if only the averaging function knows it."""
    if isinstance(average, AveragedModel):
        return _share_of_averaged_model(average)
    if hasattr(average, "shadow_params"):
        decay = getattr(average, "cur_decay_value", None)
    elif callable(getattr(average, "get_decay", None)):
        decay = average.get_decay(args[1] if len(args) > 1 else kwargs.get("step"))
    else:
        decay = getattr(average, "decay", None)
    return 1.0 - decay if isinstance(decay, float | int) else None


def _share_of_averaged_model(average: AveragedModel) -> Share:
    """Known for torch's own averaging functions only. Reads no device."""
    function: Any = average.multi_avg_fn or average.avg_fn
    made_by = "" if function is None else getattr(function, "__qualname__", "").partition(".")[0]
    if function is None or (function.__module__ == AveragedModel.__module__ and "swa" in made_by):
        count = average.n_averaged
        return 1.0 / (int(count) + 1) if count.is_cpu else 1.0 / (count.to(torch.float64) + 1.0)
    return _share_of_function(function)


@lru_cache(maxsize=64)
def _share_of_function(function: Any) -> float | None:
    if getattr(function, "__module__", None) != AveragedModel.__module__:
        return None
    decay = inspect.getclosurevars(inspect.unwrap(function)).nonlocals.get("decay")
    return 1.0 - decay if isinstance(decay, float | int) else None


def averaged(average: object, model: nn.Module, given: Sequence[Tensor]) -> tuple[list[AveragedTensor], list[str]]:
    """The model's weights with their averages, and the weights left out.

    Modules and mappings go by name, sequences by the order of the model's parameters, or of the trained ones.

    Raises:
        TypeError, ValueError: it is no average, or none of this model.
    """
    found: list[AveragedTensor] = []
    left_out = []
    for name, weight, key, tensor in _pairs(average, model, given):
        own, theirs = local_part(weight), local_part(tensor)
        if own.shape != theirs.shape:
            raise ValueError(
                f"average of {name}: shape {tuple(theirs.shape)}, its weight has {tuple(own.shape)}; "
                "pass an average of this model"
            )
        if not (own.is_floating_point() and theirs.is_floating_point()) or own.stride() != theirs.stride():
            left_out.append(f"{name} ({dtype_name(theirs.dtype)}, or laid out otherwise than its weight)")
        elif own.is_meta or theirs.is_meta:
            left_out.append(f"{name} (on the meta device, which holds no numbers)")
        elif own.numel():
            shard = mesh_shard(weight, None).number if hasattr(weight, "placements") else 0
            found.append(AveragedTensor(name, weight, tensor, key, shard))
    if not found:
        raise ValueError(
            f"average={type(average).__name__}: holds no weight of the model that can be measured; {_FORMS}"
        )
    return found, left_out


def averages_now(average: object, tensors: Sequence[AveragedTensor]) -> list[Tensor] | None:
    """The averages as a mapping or a sequence holds them now: a loop may put new tensors in their places at each
    update. None: a module holds them."""
    held = _held(average)
    return None if isinstance(held, nn.Module) else [held[tensor.key] for tensor in tensors]


def _held(average: Any) -> Any:
    """The container of the averaged tensors: a module, a mapping or a sequence."""
    inner = _module_in(average) if method_of(average) in ("update", "update_parameters") else average
    return getattr(inner, "shadow_params", inner)


def _pairs(
    average: object, model: nn.Module, given: Sequence[Tensor]
) -> list[tuple[str, Tensor, str | int, Tensor]]:
    weights = {plain_name(name): weight for name, weight in model.named_parameters()}
    held = _held(average)
    if isinstance(held, nn.Module):
        held = dict(held.named_parameters())
    if isinstance(held, Mapping):
        return [
            (name, weights[name], key, tensor)
            for name, key, tensor in ((plain_name(key), key, value) for key, value in held.items())
            if name in weights and isinstance(tensor, Tensor)
        ]
    if not isinstance(held, Sequence) or not all(isinstance(tensor, Tensor) for tensor in held):
        raise TypeError(f"average={type(average).__name__}; {_FORMS}")
    names = {id(weight): name for name, weight in weights.items()}
    every = list(weights.values())
    orders = [given] if given else [every, [weight for weight in every if weight.requires_grad]]
    order = next((order for order in orders if len(order) == len(held)), None)
    if order is None:
        raise ValueError(f"average: {len(held)} tensors, the model has {len(every)}; {_FORMS}")
    return [
        (names[id(weight)], weight, place, tensor)
        for place, (weight, tensor) in enumerate(zip(order, held, strict=True))
        if id(weight) in names
    ]
