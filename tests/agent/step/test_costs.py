"""What the first measured step of very many tensors takes: it plans, describes and looks at the resume, too; and
what the agent says that it keeps in memory, against every tensor that came to life with it."""

import gc
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from collage_agent.handle import watch
from torch import nn

from tests.agent.test_watch import Recorder
from tests.agent.training import mlp, train
from tests.paths import assert_calls

pytestmark = pytest.mark.slow

MANY = 400
CALLS = 154
"""Of Python's and C's functions, a tensor, as recorded."""
COLLECTED = 5.2
"""Objects that Python's collector looks after and that are made while the step lasts, a tensor."""


def _trained(tensors):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, generator=generator).to(torch.bfloat16) for _ in range(tensors)]
    model = nn.ParameterList(weights)
    for parameter in model.parameters():
        parameter.grad = torch.randn(8, 8, generator=generator).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    return model, optimizer


@contextmanager
def _nothing_collected():
    """Whatever other tests left behind is collected before, and nothing meanwhile: finalizers are calls, too."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _calls(optimizer):
    calls: Counter[str] = Counter()

    def count_one(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    with _nothing_collected():
        sys.setprofile(count_one)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    return calls


def _calls_added(tensors):
    model, optimizer = _trained(tensors)
    alone = _calls(optimizer)
    handle = watch(model, optimizer, budget=None, first_step=1)
    found = _calls(optimizer)
    handle.remove()
    found.subtract(alone)
    return found


def test_the_first_measured_step_visits_a_tensor_few_times():
    _calls_added(1)  # What a process does once, such as to ask of a class whether it is a mapping
    added = _calls_added(MANY)
    added.subtract(_calls_added(MANY // 2))
    assert_calls(added, CALLS * (MANY // 2))


def test_the_first_measured_step_leaves_the_collector_little_to_look_at():
    """70,000 objects more than were freed have it visit all that there is: of 20,000 tensors for half a step."""
    model, optimizer = _trained(MANY)
    handle = watch(model, optimizer, budget=None, first_step=1)
    with _nothing_collected():
        before = gc.get_count()[0]
        optimizer.step()
        made = gc.get_count()[0] - before
    handle.remove()
    assert made <= COLLECTED * MANY


def storages():
    """Bytes of every living tensor's memory, by address."""
    gc.collect()
    # What a compiler left behind has no memory.
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [found for found in gc.get_objects() if type(found) in kinds and found.layout == torch.strided]
    memory = [tensor.untyped_storage() for tensor in tensors]
    return {entry.data_ptr(): entry.nbytes() for entry in memory}


@pytest.mark.parametrize(("kind", "oracle"), [(torch.optim.AdamW, True), (torch.optim.Adafactor, False)])
def test_the_buffers_counted_are_those_that_came_with_the_watch(kind, oracle):
    model, recorder = mlp(width=200), Recorder()
    optimizer = kind(model.parameters(), lr=1e-3)
    train(model, optimizer, 2)
    optimizer.zero_grad(set_to_none=False)
    # Held, so that no buffer of the agent's comes to lie where one of them was.
    gradients = [parameter.grad for parameter in model.parameters()]
    before = storages()
    watch(model, optimizer, every=1, oracle=oracle, budget=None, reporter=recorder)
    train(model, optimizer, 2, start=2)
    said = recorder.measurements[-1].scalars["agent_memory_bytes"]
    recorder.measurements.clear()
    optimizer.zero_grad()
    kept = sum(size for address, size in storages().items() if before.get(address) != size)
    del gradients
    assert said == pytest.approx(kept, rel=0.02)
    assert said > sum(parameter.numel() for parameter in model.parameters()) / 10
