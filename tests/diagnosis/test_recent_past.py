"""The recent past begins at the last change: a cured run is healthy at once, one that turned sick is sick at once.

So it is in the terminal, over HTTP, in the table of runs and in what alerts evaluate.
"""

from typing import Any

import collage_agent as collage
import msgspec
import numpy as np
import pytest
import torch
from collage_agent import init
from collage_agent.audit.conversion import convert_checkpoint
from collage_agent.handle import watch
from collage_agent.measurement import Layout
from collage_agent.transport.report_maker import ReportMaker, SteadyTime
from collage_optim import CollageAdamW
from collage_server.alerts.condition_evaluation import Evaluation
from collage_server.exposition import samples

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from tests.agent.training import mlp, train
from tests.agent_delivery.test_attempts import Application
from tests.dashboard.generated import GeneratedRun
from tests.server.conftest import NOW
from tests.server.reads import evaluate_due
from tests.waiting import PATIENCE_SECONDS

CURE = "split-master"
SICK_STEPS, STEPS_SINCE = 100, 30


def stuck(strategy=None):
    """A model and an optimizer whose second moment is stuck and whose updates are lost."""
    model = mlp()
    if strategy is None:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, CollageAdamW(model.parameters(), lr=1e-4, strategy=strategy)


def by_another_optimizer(model, optimizer, handle, _, **options):
    handle.remove()
    cured = CollageAdamW.from_optimizer(optimizer, strategy=CURE)
    return cured, collage.watch(model, cured, **options)


def by_its_checkpoint(model, optimizer, handle, folder, **options):
    """As the tutorial does it."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
    convert_checkpoint(folder / "last.pt", CURE).write(folder / "cured.pt")
    handle.remove()
    saved = torch.load(folder / "cured.pt")
    model.load_state_dict(saved["model"])
    cured = CollageAdamW.from_optimizer(torch.optim.AdamW(model.parameters()), strategy=CURE)
    cured.load_state_dict(saved["optimizer"])
    return cured, collage.watch(model, cured, **options)


def by_its_group(model, optimizer, handle, _, **options):
    for group in optimizer.param_groups:
        group["strategy"] = CURE
    return optimizer, handle


@pytest.mark.parametrize(
    ("before", "cure", "every"),
    [
        (None, by_another_optimizer, 10),
        (None, by_its_checkpoint, 10),
        ("plain", by_its_group, 10),
        ("plain", by_its_group, 1),
    ],
)
def test_a_run_that_was_cured_is_healthy_wherever_it_is_told(served, tmp_path, before, cure, every):
    server, client = served
    run = init("p", "cured", transport=Application(server.client))
    model, optimizer = stuck(before)
    options = {"every": every, "oracle": True, "windows": (8,), "budget": None}
    handle = collage.watch(model, optimizer, **options)
    train(model, optimizer, SICK_STEPS)
    assert {"losing updates", "states are stuck"} <= {found.health for found in handle.judgement().findings}
    optimizer, handle = cure(model, optimizer, handle, tmp_path, **options)
    train(model, optimizer, STEPS_SINCE, start=SICK_STEPS)

    here = handle.judgement()
    assert here.health == "healthy", here.text
    assert handle.evidence().first_step > SICK_STEPS
    assert handle.evidence().model["oracle_steps"] <= STEPS_SINCE
    assert f"strategy {CURE}, step {SICK_STEPS + STEPS_SINCE}: healthy" in str(handle)
    run.finish(seconds=PATIENCE_SECONDS)

    there = client.overview(run.run_id, fresh=True)
    overview = client.overview(run.run_id)
    assert (there.health, there.text) == (here.health, here.text)
    assert (overview.health, overview.text, overview.against) == (here.health, here.text, [])
    (row,) = client.run_table().rows
    assert row.overview.health == "healthy"
    assert client.run(run.run_id).watch.kept_since == overview.first_step
    assert client.series(run.run_id, "edq_ratio", points=1000).steps[0] == 1, "its past is still shown"


@pytest.mark.slow
def test_a_change_for_the_worse_is_told_at_its_first_measured_step():
    model, optimizer = stuck(CURE)
    handle = watch(model, optimizer, every=10, budget=None, expect={"min_edq": 0.9}, on_breach="warn")
    train(model, optimizer, SICK_STEPS)
    assert handle.judgement().health == "healthy"
    for group in optimizer.param_groups:
        group["strategy"], group["lr"] = "plain", 1e-5
    train(model, optimizer, 10, start=SICK_STEPS)
    found, (breach,) = handle.judgement(), handle.info.broken
    assert found.health == "losing updates", found.text
    assert handle.evidence().first_step == breach.step == SICK_STEPS + 10
    assert "since when" not in str(handle), "one point shows no abrupt change"


def test_states_that_are_loaded_begin_the_recent_past_anew_with_the_next_step():
    model, optimizer = stuck()
    handle = watch(model, optimizer, every=10, budget=None, oracle=True)
    train(model, optimizer, 25)
    states = optimizer.state_dict()
    optimizer.load_state_dict(states)
    train(model, optimizer, 10, start=25)
    assert (handle.evidence().first_step, handle.info.kept_since) == (26, 26)
    assert handle.evidence().model["oracle_steps"] == 5.0


def test_one_of_several_optimizers_begins_the_recent_past_of_all_anew():
    """The numbers are those of the whole model: before the change they would be of another way to keep it."""
    model = mlp()
    first = CollageAdamW(model[0].parameters(), strategy="plain", lr=1e-4)
    second = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=1e-4)

    def both(steps, start):
        for step in range(start, start + steps):
            train(model, first, 1, start=step)
            second.step()

    handle = watch(model, [first, second], every=5, budget=None)
    both(20, 0)
    first.param_groups[0]["strategy"] = CURE
    both(10, 20)
    assert (handle.evidence().first_step, handle.info.kept_since) == (25, 25)


def test_the_newest_change_of_all_watches_is_that_of_the_stream():
    maker, layouts = ReportMaker(SteadyTime()), list[Layout]()
    for strategy in ("plain", CURE):
        model, optimizer = stuck(strategy)
        handle = watch(model, optimizer, every=5, budget=None)
        train(model, optimizer, 10)
        if layouts:
            optimizer.load_state_dict(optimizer.state_dict())
            train(model, optimizer, 5, start=10)
        assert handle._last is not None
        layouts.append(handle._last.layout)
    assert [layout.watch.kept_since for layout in layouts] == [1, 11]
    assert maker.declare(layouts[0], 0)
    assert maker.declare(layouts[1], 1)
    assert maker.watch is not None
    assert (maker.watch.observed_strategy, maker.watch.kept_since) == ("plain", 11)


SICK, WELL = ("plain", "bfloat16"), ("master-weights", "bfloat16")


class Reported:
    """A run as launches of it report: each measured step as such a training's end."""

    def __init__(self, server):
        self.server = server
        server.run()

    def launch(self, name, kept, steps, begins=None, **watch):
        """A launch, or another declaration of one, that measures these steps from `begins` on."""
        made = GeneratedRun("made", kept[0], kept[1], steps=1000)
        begins = steps[0] if begins is None else begins
        self.server.attempt("r1", launch_id=name, first_step=begins)
        told = {"layers": made.layers, "statistics": list(made.totals(1000))}
        info = msgspec.structs.replace(made.watch(), **watch)
        self.server.stream("r1", stream_id=name, launch_id=name, watch=info, measured_from=begins, **told)
        by_layer, model = made.totals(1000), made.model_totals(1000)
        sent: Any = {
            "statistic_count": len(by_layer),
            "layer_count": len(made.layers),
            "statistics": wire.array_to_bytes(np.stack(list(by_layer.values()))),
            "model": wire.array_to_bytes(np.array([float(model[key]) for key in by_layer])),
        }
        reports = [wire.Report(seq=step, step=step, time=NOW + step, **sent) for step in steps]
        if reports:
            self.server.reports(reports, name)

    def overview(self):
        """It, evaluated as the background thread does it."""
        store = self.server.app.state.collage.store
        evaluate_due(store, 1)
        return self.server.get("/runs/r1/overview", wire.Overview)

    def fired(self):
        """The alerts on what the judgement holds against it that fire within an hour."""
        app_state = self.server.app.state.collage
        app_state.summariser.keep_points()
        shown = list(samples(app_state))
        evaluation = Evaluation([ALERTS["CollageUpdatesLost"], ALERTS["CollageSecondMomentStuck"]])
        changes = [change for minute in range(60) for change in evaluation.observe(NOW + 60.0 * minute, shown)]
        return {change.alert.name for change in changes}


def cured_at_a_resume(run):
    run.launch("one", SICK, range(20, 1001, 20))
    run.launch("two", WELL, range(1001, 1202, 20))


def cured_by_another_dtype(run):
    run.launch("one", SICK, range(20, 1001, 20))
    run.launch("two", ("plain", "float32"), range(1001, 1202, 20))


def cured_from_an_earlier_step(run):
    """The second launch is hidden with all its steps; the third comes beyond where it began."""
    run.launch("one", SICK, range(20, 1001, 20))
    run.launch("two", SICK, range(1001, 1042, 20))
    run.launch("three", WELL, range(901, 1202, 20))


def converted_in_a_launch(run):
    """By an agent that says no more than that."""
    run.launch("one", SICK, range(20, 1001, 20))
    conversion = wire.Conversion(source="plain", target="master-weights", step=1000)
    run.launch("one", WELL, range(1001, 1202, 20), begins=20, conversion=conversion)


def changed_in_a_launch(run):
    run.launch("one", SICK, range(20, 1001, 20), kept_since=20)
    run.launch("one", WELL, range(1001, 1202, 20), begins=20, kept_since=1001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cured", "since", "sealed"),
    [
        (cured_at_a_resume, 1001, False),
        (cured_by_another_dtype, 1001, True),
        (cured_from_an_earlier_step, 901, False),
        (cured_from_an_earlier_step, 901, True),
        (converted_in_a_launch, 1001, False),
        (changed_in_a_launch, 1001, True),
    ],
)
def test_what_was_cured_is_healthy_on_the_server_and_silent(served, cured, since, sealed):
    (server, client), run = served, Reported(served[0])
    cured(run)
    if sealed:
        server.seal()
    overview = run.overview()
    assert (overview.health, overview.first_step, overview.last_step) == ("healthy", since, 1201), overview.text
    assert (overview.against, overview.since) == ([], None)
    assert client.run_table().rows[0].overview == overview
    read = client.overview("r1", fresh=True)
    assert (read.health, read.text) == (overview.health, overview.text)
    assert "collage_finding{" not in server.get("/metrics")
    assert run.fired() == set()


@pytest.mark.slow
def test_what_turned_sick_at_a_resume_is_told_at_its_first_step_and_alerts(served):
    client, run = served[1], Reported(served[0])
    run.launch("one", WELL, range(20, 2001, 20))
    assert run.overview().health == "healthy"
    run.launch("two", SICK, [2001])
    found = run.overview()
    assert (found.health, found.first_step, found.last_step) == ("losing updates", 2001, 2001)
    assert client.overview("r1", fresh=True).health == "losing updates"
    run.launch("two", SICK, range(2020, 2201, 20), begins=2001)
    alone = run.overview().numbers["lost_update_ratio"]
    assert alone == pytest.approx(found.numbers["lost_update_ratio"]), "nothing of before is in it"
    assert run.fired() == {"CollageUpdatesLost", "CollageSecondMomentStuck"}


def test_a_launch_without_a_measured_step_leaves_the_run_as_it_was(served):
    """It ended before its first one, or only logs: nothing newer is known of the run."""
    server, run = served[0], Reported(served[0])
    run.launch("one", WELL, range(20, 1001, 20))
    before = run.overview()
    run.launch("two", WELL, [], begins=1001, kept_since=1001)
    server.attempt("r1", launch_id="logs", first_step=1100)
    after = run.overview()
    assert (after.health, after.first_step, after.text) == (before.health, before.first_step, before.text)
