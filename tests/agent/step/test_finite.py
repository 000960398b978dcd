"""What is not finite is found by sums on the host, and element by element on a device: alike."""

from functools import partial

import pytest
import torch
from collage_agent.step import observed_step
from torch import nn

from tests.agent.test_watch import Recorder
from tests.agent.training import adamw, backward, watched

pytestmark = pytest.mark.slow


def totals(bad):
    recorder = Recorder()
    model, optimizer, _ = watched(partial(adamw, weight_decay=0.1), sample=64, oracle=True, reporter=recorder)
    for step in range(4):
        backward(model, step)
        if bad and step == 2:
            next(model.parameters()).grad.view(-1)[::3] = torch.nan
        optimizer.step()
    return [measurement.totals for measurement in recorder.measurements]


def test_what_is_not_finite_in_one_tile_is_left_out_of_the_oracle_after_the_others(monkeypatch):
    def measured():
        model, recorder = nn.Linear(32, 32, bias=False).half(), Recorder()
        nn.init.zeros_(model.weight)
        with torch.no_grad():
            model.weight[0] = 65504.0
        sgd = partial(torch.optim.SGD, lr=1.0)
        _, optimizer, _ = watched(sgd, model, sample="all", oracle=True, reporter=recorder)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            # fp16 ends at 65,504, the oracle's fp64 does not.
            gradient = -32.0 * torch.rand(32, 32, generator=generator).half() - 32.0
            model.weight.grad = gradient
            optimizer.step()
        return dict(recorder.measurements[-1].table()), gradient[1:].double().square().sum().item()

    whole, stepped = measured()
    assert whole["nonfinite"].sum() == 32
    assert whole["oracle_squared_sum"].sum() == pytest.approx(stepped, rel=1e-12)
    monkeypatch.setattr(observed_step, "TILE_SLOTS", 256)
    in_tiles, _ = measured()
    for key in whole:
        if key.startswith("oracle"):
            assert in_tiles[key] == pytest.approx(whole[key], rel=1e-12, nan_ok=True), key


@pytest.mark.parametrize("bad", [False, True])
def test_both_ways_to_find_what_is_not_finite_agree(bad, monkeypatch):
    found = totals(bad)
    monkeypatch.setattr(observed_step, "on_host", lambda rows: False)
    torch.testing.assert_close(found, totals(bad), rtol=0, atol=0, equal_nan=True)
