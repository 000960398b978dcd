"""What the host may do without waiting for a device: hand it numbers, and read those that it holds itself."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["from_host", "reads_at_once"]


def from_host(values: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """The values on `device`: themselves where that is the host.

    Does not synchronise: a CUDA device takes them from pinned memory when the work before them is done. From any
    other memory, the host would wait for that work.
    """
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def reads_at_once(device: torch.device) -> bool:
    """Whether a value can be read without waiting for a device."""
    return device.type == "cpu"
