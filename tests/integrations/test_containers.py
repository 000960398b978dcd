"""torchtitan's container of optimizers, as a replica of 0.3.0's; `make doors` trains with the real one."""

import pytest
import torch
from collage_agent.handle import watch

from tests.agent.training import mlp, mlp_loss

pytestmark = pytest.mark.slow


class OptimizersContainer(torch.optim.Optimizer):
    """torchtitan/components/optimizer/optimizer.py: an optimizer each kind, and one over all their parameters."""

    def __init__(self, model):
        *others, last = model.parameters()
        self.optimizers = [torch.optim.AdamW(others, lr=1e-3), torch.optim.Adam([last], lr=1e-3)]
        super().__init__([*others, last], {})

    def __iter__(self):
        return iter(self.optimizers)

    def __len__(self):
        return len(self.optimizers)

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


class Relayed(OptimizersContainer):
    """Another one that lists optimizers, but does not say that they are all there is to it."""

    __iter__ = None  # type: ignore[assignment]


def trained(choose, kind=OptimizersContainer):
    model = mlp()
    container = kind(model)
    handle = watch(model, choose(container), every=2, sample="all")
    for step in range(6):
        container.zero_grad()
        mlp_loss(model, step).backward()
        container.step()
    return handle


def test_a_container_is_watched_as_its_optimizers_are(caplog):
    whole, parts = trained(lambda container: container), trained(lambda container: container.optimizers)
    assert not caplog.records
    assert whole.info == parts.info
    assert whole.summary() == parts.summary()
    assert whole.info.optimizer == "AdamW + Adam"
    assert whole.info.intent == "shadow"
    assert len(whole.summary()["layers"]) == 6


def test_what_only_lists_optimizers_is_left_as_it_is():
    handle = trained(lambda container: container, Relayed)
    assert handle.info.optimizer == "Relayed"
    assert "watch optimizer.optimizers[0] in its place" in handle.info.intent_reason
