"""Samples gathered by one launch: with the bits of those gathered tensor by tensor, until there is a kernel."""

import collections
import contextlib
import threading

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.sample.sampling import draw
from collage_agent.step import device_gather, gather, missed_shares, observed_step
from collage_agent.step.gather import BlockLayout, Staging
from collage_agent.watching.hooks import OptimizerHooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.optim.triton_apart import only_where_published, run_with_triton
from tests.waiting import until

BY_DAY = ("law 0 40", "left_out", "totals", "ahead 8")
BY_NIGHT = (*(f"law {seed} 150" for seed in range(1, 6)), *(f"ahead {word}" for word in (4, 2, 1)))


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize("part", [*BY_DAY, *(pytest.param(part, marks=pytest.mark.nightly) for part in BY_NIGHT)])
def test_where_triton_is_installed(part):
    run_with_triton("tests.agent.sample.with_triton", *part.split(), interpreted="ahead" not in part)


class Kernel:
    """A kernel whose compiler waits for `is_compiled`; each launch is a failure if there is one."""

    def __init__(self, is_compiled, failure=None):
        self.is_compiled, self.failure, self.launches = is_compiled, failure, 0

    def warmup(self, *dtypes, grid, **options):
        self.is_compiled.wait(60)

    def __getitem__(self, grid):
        def launch(*tables, **options):
            self.launches += 1
            if self.failure:
                raise self.failure

        return launch


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Samples are gathered by a kernel, and nothing is read without waiting."""
    monkeypatch.setattr(gather, "has_kernel", lambda device: True)
    monkeypatch.setattr(device_gather, "launches", lambda device: True)
    monkeypatch.setattr(device_gather, "_KERNELS", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for module in (observed_step, missed_shares):
        monkeypatch.setattr(module, "on_host", lambda values: False)
    monkeypatch.setattr(gather, "max_norms", lambda tensors: torch._foreach_norm(tensors, torch.inf))


@pytest.fixture
def gathering(as_on_a_device):
    """Returns what gathers five tensors, and whether it copied each by itself."""
    tensors = [torch.arange(64.0) + place for place in range(5)]
    layout = BlockLayout([draw(f"t{place}", 64, 4, 32) for place in range(5)], tensors)

    def gather():
        staging = Staging(layout, torch.float32)
        layout.gather(tensors, staging)
        return bool(staging.values.any())

    return gather


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "collage-gather"]


def test_training_does_not_wait_for_the_compiler(gathering, monkeypatch):
    is_compiled = threading.Event()
    kernel = Kernel(is_compiled)
    monkeypatch.setattr(device_gather, "built", lambda name, source: kernel)
    assert gathering()
    assert gathering()
    (thread,) = threads()
    # As a daemon, it could be ended inside the compiler, and the process with it.
    assert not thread.daemon
    assert kernel.launches == 0
    is_compiled.set()
    until(lambda: not threads())
    assert not gathering()
    assert kernel.launches == 1


def test_without_triton_one_line_is_logged_and_nothing_is_tried_again(gathering, monkeypatch, caplog):
    tried = []

    def absent(name, source):
        tried.append(name)
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(device_gather, "built", absent)
    with caplog.at_level("INFO", "collage_agent"):
        for _ in range(3):
            assert gathering()
            until(lambda: not threads())
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "No module named 'triton'" in caplog.text
    assert tried == ["gather"]


def test_a_launch_that_fails_is_the_last_one(gathering, monkeypatch, caplog):
    kernel = Kernel(threading.Event(), RuntimeError("out of resources"))
    kernel.is_compiled.set()
    monkeypatch.setattr(device_gather, "built", lambda name, source: kernel)
    with caplog.at_level("INFO", "collage_agent"):
        assert gathering()
        until(lambda: not threads())
        assert gathering()
        assert gathering()
    assert kernel.launches == 1
    assert caplog.text.count("out of resources") == 1


class Counting(TorchDispatchMode):
    """Counts the operations that a device would carry out, by name."""

    FREE = frozenset(
        ("view", "detach", "slice", "select", "expand", "t", "unsqueeze", "as_strided", "alias", "split")
    )
    """They look at a tensor, or allocate one."""

    def __init__(self):
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # Step counters are on the host, where reading one launches nothing.
        if name not in self.FREE and not name.startswith(("empty", "new_empty", "_local_scalar", "lift")):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def calls_of_measured_steps(monkeypatch, tensors, kernel):
    """Of three measured steps: without states, with new ones, and one as most are."""
    weights = torch.nn.ParameterList([torch.ones(40 + 60 * (place % 2), 64).bfloat16() for place in range(tensors)])
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-3, fused=True)
    handle = watch(weights, optimizer, every=1, sample=512, budget=None)
    monkeypatch.setattr(device_gather, "_kernel_of", lambda device, word: kernel)
    found: list[collections.Counter[str]] = []
    with monkeypatch.context() as patch:
        for name in ("_gather_before", "_measure"):
            original = getattr(OptimizerHooks, name)

            def counted(*arguments, _original=original):
                with Counting() as counting:
                    _original(*arguments)
                found[-1] += counting.calls

            patch.setattr(OptimizerHooks, name, counted)
        for _ in range(3):
            found.append(collections.Counter())
            for weight in weights:
                weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
    handle.remove()
    return found


@pytest.mark.usefixtures("as_on_a_device")
def test_a_model_of_more_tensors_is_no_more_calls(monkeypatch):
    few, many = Kernel(threading.Event()), Kernel(threading.Event())
    expected = calls_of_measured_steps(monkeypatch, 6, few)
    assert calls_of_measured_steps(monkeypatch, 24, many) == expected
    assert few.launches == many.launches == 6
    assert expected[2].total() < 210
    assert max(step.total() for step in expected) < 500
