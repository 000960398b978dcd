"""What the agent says that it keeps in memory, against every tensor that came to life with it."""

from __future__ import annotations

import gc

import pytest
import torch
from collage_agent.handle import watch

from tests.agent.test_watch import Recorder
from tests.agent.training import mlp, train

pytestmark = pytest.mark.slow


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
