"""Numbers handed to a device without waiting for it, and which devices can be read without waiting.

The optimizers, and the agent's `step/` and `watching/`, call it within a training step, so nothing here may
synchronise (on a device: `tests/optim/test_cuda.py`, `tests/agent/test_cuda.py`).
`tests/optim/test_external_writes.py` replaces `reads_at_once` to act as a device.
"""

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
