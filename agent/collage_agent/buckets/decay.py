"""Which optimizers decay weights apart from the gradient, and at which rate."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.optim import CollageAdam, CollageAdamW, CollageLion

__all__ = ["decoupled_rate"]

_ALWAYS: Final = (torch.optim.AdamW, CollageAdamW, CollageLion)


def decoupled_rate(optimizer: Optimizer, group: dict[str, Any]) -> float | Tensor | None:
    """lr·λ of a parameter group, a tensor where the learning rate is one on a device; None: coupled, or not known.

    Torch says so in the group (`decoupled_weight_decay`); of other classes only ours are known. Synchronises
    nothing: tensors on the host are read, others not.
    """
    always = isinstance(optimizer, _ALWAYS) and not isinstance(optimizer, CollageAdam)
    if not group.get("decoupled_weight_decay", always):
        return None
    rate, decay = _number(group.get("lr")), _number(group.get("weight_decay"))
    return None if rate is None or decay is None else rate * decay


def _number(value: Any) -> float | Tensor | None:
    if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
        return float(value)
    return value if isinstance(value, Tensor | float | int) else None
