"""What is not finite is found by sums on the host, and element by element on a device: alike."""

from __future__ import annotations

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.step import observed_step

from tests.agent.test_watch import Recorder
from tests.agent.training import mlp, mlp_loss

pytestmark = pytest.mark.slow


def totals(bad):
    model, recorder = mlp(), Recorder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    watch(model, optimizer, every=1, sample=64, budget=None, oracle=True, reporter=recorder)
    for step in range(4):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        if bad and step == 2:
            next(model.parameters()).grad.view(-1)[::3] = torch.nan
        optimizer.step()
    return [measurement.totals for measurement in recorder.measurements]


@pytest.mark.parametrize("bad", [False, True])
def test_both_ways_to_find_what_is_not_finite_agree(bad, monkeypatch):
    found = totals(bad)
    monkeypatch.setattr(observed_step, "on_host", lambda rows: False)
    torch.testing.assert_close(found, totals(bad), rtol=0, atol=0, equal_nan=True)
