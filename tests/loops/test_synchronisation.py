"""The agent's frames on the training thread read no tensor back: nothing of theirs can wait for a device."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import collage_agent as collage
import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from collage_agent.step.measurer import StepMeasurer
from collage_agent.transport import MemoryTransport
from collage_optim import CollageAdamW, CollageSGD

from tests.agent.training import gpt_loss, mlp, mlp_loss, small_gpt

pytestmark = pytest.mark.slow

AGENT = str(Path(collage.__file__).parent)
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


MAKERS = {
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "whole tensors": lambda p: pytorch_optimizer.CAME(p, lr=1e-3),
    "CollageAdamW": lambda p: CollageAdamW(p, lr=1e-3, strategy="plus"),
    "CollageSGD": lambda p: CollageSGD(p, lr=1e-3, momentum=0.9, strategy="light"),
}
STEPS = 8
COUNTERS = frozenset(range(STEPS + 2)) | {1e-3, float(torch.tensor(1e-3))}
"""Numbers of steps, and the learning rate where it is a tensor on the host."""


def train(model, optimizer, steps=STEPS, loss_of=gpt_loss, scaled=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def kind_of(name, scaled):
    return scaled and name, "Collage" in name, name in ("whole tensors", "AdamW tensor rate") and name


@pytest.mark.drawn(by=kind_of)
@pytest.mark.parametrize(
    ("name", "scaled"),
    [*((name, False) for name in MAKERS), ("AdamW for-loop", True), ("AdamW fused", True)],
)
def test_measured_steps_read_nothing_back(name, scaled):
    """Nor is a loss scaler's verdict read."""
    model = small_gpt(dtype=torch.float32 if scaled else torch.bfloat16, layers=1)
    optimizer = MAKERS[name](model.parameters())
    handle = watch(model, optimizer, every=2, sample=512, oracle=True, windows=(2,), budget=None)
    with reading_is_forbidden(COUNTERS):
        train(model, optimizer, scaled=scaled)
    summary = handle.summary()
    assert summary["step"] == STEPS
    assert name == "whole tensors" or summary["model"]["edq_window_ratio/2"] is not None
    whole = summary["model"]["sampled"] == summary["model"]["elements"]
    assert whole == (name == "whole tensors")


def test_steps_within_the_backward_pass_read_nothing_back():
    model = small_gpt(layers=1)
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: optimizers[own].step())
    handle = watch(model, optimizers, every=2, sample=512, oracle=True, windows=(2,), budget=None)
    with reading_is_forbidden(COUNTERS):
        for step in range(STEPS):
            model.zero_grad()
            gpt_loss(model, step).backward()
    assert handle.summary()["step"] == STEPS


def test_logging_and_reporting_read_nothing_back_here(tmp_path):
    transport = MemoryTransport()
    with collage.init("loops", transport=transport, dir=tmp_path):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        collage.watch(model, optimizer, every=1, oracle=True)
        with reading_is_forbidden(COUNTERS):
            for step in range(STEPS):
                loss = mlp_loss(model, step)
                loss.backward()
                optimizer.step()
                collage.log({"loss": loss})
    assert {report.step for report in transport.reports} == set(range(1, STEPS + 1))
    assert all("loss" in report.scalars for report in transport.reports)


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "__bool__", "__float__"])
def test_a_reader_would_be_caught(read, monkeypatch):
    """A watch whose look reads the sum of a gradient raises under the rule, so the rule can fail."""
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer, every=1)
    scope: dict = {}
    exec(compile(f"def peek(tensor): tensor.sum().{read}()", f"{AGENT}/peek.py", "exec"), scope)
    original = StepMeasurer.before

    def curious(measurer, stepping, **options):
        scope["peek"](measurer.watched[0].parameter.grad)
        return original(measurer, stepping, **options)

    monkeypatch.setattr(StepMeasurer, "before", curious)
    with reading_is_forbidden(COUNTERS), pytest.raises(ReadBack):
        train(model, optimizer, 1, loss_of=mlp_loss)
