"""What would make the training thread wait for a device: only step counters on the host may be read back."""

from functools import partial
from typing import Any

import pytest
import torch
from collage_agent.step import observed_step, optimizer_oracles
from collage_agent.watching.hooks import OptimizerHooks
from collage_agent.watching.resume_check import largest_step_count
from collage_optim import CollageAdamW
from torch.utils._python_dispatch import TorchDispatchMode

from tests.agent.training import mlp, train, watched

READING: Any = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.bincount)


class Listening(TorchDispatchMode):
    """Keeps the arguments of every operation that hands a value to the host, or a shape that depends on values."""

    def __init__(self):
        super().__init__()
        self.read: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in READING:
            self.read.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, CollageAdamW], ids=["AdamW", "SGD", "ours"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "as on a device"])
def test_a_measured_step_reads_nothing_but_step_counters(make, on_host, monkeypatch):
    monkeypatch.setattr(optimizer_oracles, "on_host", lambda values: on_host)
    monkeypatch.setattr(observed_step, "on_host", lambda values: on_host)
    model, optimizer, handle = watched(partial(make, lr=1e-3), sample=256, oracle=True, windows=(2,), steps=3)
    listening = Listening()
    for name in ("_gather_before", "_measure"):
        original = getattr(OptimizerHooks, name)

        def listened(*arguments, _original=original):
            with listening:
                return _original(*arguments)

        monkeypatch.setattr(OptimizerHooks, name, listened)
    train(model, optimizer, 5, start=3)
    assert handle.summary()["step"] == 8
    assert handle.summary()["model"]["edq_window_ratio/2"] is not None
    assert {tuple(tensor.shape) for tensor in listening.read} <= {()}
    assert {float(tensor) for tensor in listening.read} <= {3.0, 4.0, 5.0, 6.0, 7.0, 8.0}


@pytest.mark.parametrize("fused", [False, True], ids=["a tensor each", "fused"])
def test_a_resumed_optimizer_s_counters_on_the_host_are_all_that_is_read(fused):
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    train(model, optimizer, 3)
    listening = Listening()
    with listening:
        assert largest_step_count(optimizer) == 3
    assert all(counter.is_cpu and float(counter) == 3.0 for counter in listening.read)
