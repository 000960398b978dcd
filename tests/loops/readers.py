"""Catches whoever reads a tensor's values back on the training thread from inside the agent."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import collage_agent
import pytest
import torch

AGENT = str(Path(collage_agent.__file__).parent)
OPTIMIZERS = (f"{AGENT}/optim", f"{AGENT}/numerics")
"""Our optimizers' own steps are the user's; what the agent calls there has the agent's frames above it."""
READING = (
    *("item", "tolist", "cpu", "nonzero", "unique", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "__format__", "__repr__"),
)
"""Not `numpy`: of a tensor on a device it is an error by itself, of one on the host it waits for nothing."""
_VALUE = torch.Tensor.item


class ReadBack(AssertionError):
    """The agent read a value that a device may still be computing."""


@contextmanager
def reading_is_forbidden(counters):
    """Inside, an agent's frame that reads a tensor raises, but for step counters, numbers of the set `counters`.

    Torch keeps these on the host unless told otherwise, and reading them there waits for nothing. Tables of
    integers are the agent's own plan: nothing that a step computes.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in READING:
            patch.setattr(torch.Tensor, name, _guarded(name, getattr(torch.Tensor, name), counters))
        yield


def _guarded(name, original, counters):
    def read(tensor, *arguments, **options):
        computed = tensor.is_floating_point() or tensor.dtype == torch.bool
        counter = tensor.dim() == 0 and tensor.is_cpu and _VALUE(tensor) in counters
        if computed and not counter and _in_the_agent():
            raise ReadBack(f"{name} of a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}")
        return original(tensor, *arguments, **options)

    return read


def _in_the_agent():
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(AGENT) and not name.startswith(OPTIMIZERS):
            return True
        frame = frame.f_back
    return False
