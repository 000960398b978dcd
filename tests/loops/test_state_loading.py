"""torch's functions for states take a step of their own to make them: it is none of the training's."""

import copy

import collage_agent as collage
import pytest
import torch
from collage_agent.transport import MemoryTransport
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from collage_monitor import wire

TAKEN = 50


def built():
    torch.manual_seed(0)
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()


def reported(tmp_path, model, optimizer, before_training):
    """The first step of the attempt, and the steps that are reported, of a watch that begins before."""
    transport = MemoryTransport()
    with collage.init("p", "r", dir=tmp_path, transport=transport):
        collage.watch(model, optimizer, every=1, budget=None)
        before_training()
        train(model, optimizer, 3)
    begun = [message.first_step for message in transport.messages if isinstance(message, wire.AttemptCreate)]
    batches = [message for message in transport.messages if isinstance(message, wire.ReportBatch)]
    return begun, [report.step for batch in batches for report in batch.reports]


@pytest.mark.parametrize("groups", [1, 2])
def test_steps_go_on_where_states_are_loaded_after_the_watch_began(tmp_path, groups):
    """The attempt began at step 1, and hid all that the attempt before had shown."""
    model, optimizer = built()
    train(model, optimizer, TAKEN)
    kept = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    model, optimizer = built()
    steps = reported(tmp_path, model, optimizer, lambda: set_optimizer_state_dict(model, optimizer, kept))
    assert steps == ([TAKEN + 1], [TAKEN + 1, TAKEN + 2, TAKEN + 3])


def test_a_training_that_is_saved_before_its_first_step_begins_with_step_1(tmp_path):
    model, optimizer = built()
    steps = reported(tmp_path, model, optimizer, lambda: get_optimizer_state_dict(model, optimizer))
    assert steps[0] in ([1], [2]), "torch's counter says 1 after its own step"
    assert len(steps[1]) == 3
