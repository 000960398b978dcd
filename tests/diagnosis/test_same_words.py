"""The same numbers give the same words, in the training process and from the server: of averages and skipped steps.

What else befalls a run is drawn in `test_one_answer.py`.
"""

import collage_agent as collage
import pytest
import torch
from collage_agent import init
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from collage_monitor.diagnosis import finite
from tests.agent.training import mlp, mlp_loss, train
from tests.agent_delivery.test_attempts import Application
from tests.waiting import PATIENCE_SECONDS, until


@pytest.mark.slow
def test_an_average_that_stands_still_is_told_everywhere_of_a_run_whose_weights_are_healthy(served):
    server, client = served
    run = init("p", "average", transport=Application(server.client))
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9999)).bfloat16()
    handle = collage.watch(model, optimizer, every=1, sample="all", oracle=True)
    for step in range(40):
        train(model, optimizer, 1, start=step)
        average.update_parameters(model)
    here, summary = handle.judgement(), handle.summary()
    assert here.health == "average is off", here.text
    assert summary["model"]["edq_ratio"] == pytest.approx(1.0, abs=0.01)
    run.finish(seconds=PATIENCE_SECONDS)

    there = client.overview(run.run_id, fresh=True)
    assert (here.health, here.text, here.advised) == (there.health, there.text, there.advised)
    latest = client.latest(run.run_id).model
    series = client.series(run.run_id, "average_moved_ratio", layer="0.weight", points=100)
    (found,) = handle.averages
    assert found.reported
    for key in ("edq", "lost", "moved", "displacement", "drift"):
        name = f"average_{key}_ratio"
        assert finite(latest[name]) == pytest.approx(summary["model"][name], rel=1e-9)
    assert series.values[-1] == summary["layers"]["0.weight"]["average_moved_ratio"]


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_run_whose_steps_are_all_skipped_is_told_everywhere_while_it_goes_on(served, fused, logs):
    """The server had no word, no gauge and no finding of it, and a fused optimizer's layers "had no gradient"."""
    server, client = served
    run = init("p", "skipped", transport=Application(server.client))
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    handle = collage.watch(model, optimizer, every=1, budget=None)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(65):
        scaler.scale(mlp_loss(model, step) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if logs:
            collage.log({"tokens": step})
    here = handle.judgement()
    assert (here.health, here.findings[0].alert) == ("not finite", "CollageNotFinite")
    until(lambda: "skipped_steps" in client.latest(run.run_id).scalars, "the report of skipped steps")
    until(lambda: client.latest(run.run_id).scalars["skipped_steps"].value == 65.0, "the report of the last")
    there = client.overview(run.run_id, fresh=True)
    assert (here.health, here.headline, here.advised) == (there.health, there.headline, there.advised)
    (found,) = there.findings
    assert (found.key, found.value, found.alert) == ("skipped_steps", 65.0, "CollageNotFinite")
    run.finish(seconds=PATIENCE_SECONDS)
    events = client.events(run.run_id).events
    assert {event.kind for event in events} == {"attempt", "skipped_steps"}
    assert events[0].step == 1
