"""A step that the oracles may have missed, because looking at the optimizer failed, is never counted as taken."""

from __future__ import annotations

import torch
from collage_agent import error_guard
from collage_agent.handle import watch
from collage_agent.step.bucket import Bucket

from tests.agent.test_watch import Recorder
from tests.agent.training import mlp, train


def test_oracles_attach_anew_after_a_failure_before_the_step(monkeypatch):
    model, recorder = mlp(), Recorder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer, every=1, sample=64, budget=None, oracle=True, reporter=recorder)
    train(model, optimizer, 3)

    def fails(*arguments, **options):
        raise ValueError("no look at this step")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "gather_before", fails)
        error_guard.raise_in_tests(False)
        train(model, optimizer, 1, start=3)
    error_guard.raise_in_tests(True)
    train(model, optimizer, 2, start=4)
    last = recorder.measurements[-1]
    assert [measurement.step for measurement in recorder.measurements] == [1, 2, 3, 5, 6]
    assert last.scalars["oracle_restarts"] == 1
    assert last.table()["oracle_steps"].max() == 2
