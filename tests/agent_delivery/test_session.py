"""The public face with a real training: init, watch, log, finish, and what a process does around them."""

import gc
import random
import textwrap

import collage_agent as collage
import numpy as np
import pytest
import torch
from collage_agent.session import _SESSION
from collage_agent.transport import MemoryTransport
from torch import nn

from collage_monitor.statistics import finish_all
from collage_monitor.wire import AttemptCreate, RunCreate, RunUpdate, StreamCreate, array_from_bytes
from tests.agent_delivery.doubles import arrived, of_kind
from tests.agent_delivery.test_attempts import Training
from tests.forking import TORCH, TRAINING, run_forked
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path))


def by_default(**options):
    """A watch with these options alone."""
    training = Training()
    return collage.watch(training.model, training.optimizer, **options)


def measured_steps(transport):
    return [report.step for report in transport.reports if report.statistics]


def run_python(code, *, status=0, imports=TRAINING):
    result = run_forked(imports, "-W", "error", "-c", textwrap.dedent(code))
    assert result.returncode == status, result.stderr
    return result


def test_a_training_from_init_to_finish(transport, capsys):
    run = collage.init("project", "name", transport=transport)
    training = Training()
    handle = training.watch(every=2)
    training.take(6)
    summary = handle.summary()
    collage.finish()
    assert collage.current_run() is None
    assert of_kind(transport, AttemptCreate)[0].first_step == 1
    stream = of_kind(transport, StreamCreate)[-1]
    assert [layer.name for layer in stream.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert measured_steps(transport) == [1, 2, 4, 6]
    last = [report for report in transport.reports if report.statistics][-1]
    logged = {report.step: report.scalars["loss"] for report in transport.reports if "loss" in report.scalars}
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    totals = array_from_bytes(last.model, (last.statistic_count,))
    finished = finish_all(dict(zip(stream.statistics, totals, strict=True)))
    assert summary["step"] == 6
    assert float(finished["edq_ratio"]) == pytest.approx(summary["model"]["edq_ratio"])
    block = array_from_bytes(last.statistics, (last.statistic_count, last.layer_count))
    elements = block[stream.statistics.index("elements")]
    np.testing.assert_array_equal(elements, [128, 16, 64, 4])
    assert run.reports_sent == len(transport.reports)
    printed = capsys.readouterr().out
    assert str(handle) in printed
    assert run.run_id in printed


def test_a_watch_made_before_the_run_joins_it_though_nobody_keeps_its_handle(transport):
    training = Training()
    training.watch()
    gc.collect()
    training.take(2, log=False)
    collage.init(transport=transport)
    training.take(2)
    collage.finish()
    assert of_kind(transport, AttemptCreate)[0].first_step == 3
    assert [report.step for report in transport.reports] == [3, 4]
    assert all("loss" in report.scalars and report.statistics for report in transport.reports)


def test_a_watch_stays_with_its_own_run():
    first, second = MemoryTransport(), MemoryTransport()
    old, new = Training(), Training()
    collage.init(transport=first)
    old.watch()
    old.take(5)
    collage.init(transport=second)
    new.watch()
    old.take(1, log=False)
    new.take(2)
    collage.finish()
    assert measured_steps(first) == [1, 2, 3, 4, 5]
    assert first.messages[-1] == RunUpdate(state="finished")
    assert [report.step for report in second.reports] == [1, 2]


def hooks_on(optimizer):
    return len(optimizer._optimizer_step_post_hooks)


def test_a_watch_ends_with_its_run():
    """A notebook's cell that is run again went on measuring twice, and printed the verdicts of before."""
    training = Training()
    for _ in range(2):
        collage.init(transport=MemoryTransport())
        handle = training.watch()
        training.take(2)
        assert hooks_on(training.optimizer) == 1
    collage.finish()
    assert (hooks_on(training.optimizer), handle.step) == (0, 4)
    assert handle.summary()["step"] == 4, "what it measured stays"


@pytest.mark.parametrize("with_run", [False, True])
def test_a_second_watch_of_an_optimizer_takes_the_place_of_the_first(transport, caplog, with_run):
    if with_run:
        collage.init(transport=transport)
    training, other = Training(), torch.optim.SGD(nn.Linear(3, 3).parameters())
    first = training.watch()
    beside = collage.watch(training.model, other)
    second = training.watch(every=2)
    assert (first.removed, beside.removed, second.removed) == (True, False, False)
    assert caplog.text.count("an earlier watch of these optimizers ends") == 1
    training.take(4)
    collage.finish()
    assert measured_steps(transport) == ([1, 2, 4] if with_run else [])


def test_a_log_without_a_run_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(_SESSION, "runs_begun", 0)
    monkeypatch.setattr(_SESSION, "told_of_log", False)
    for _ in range(3):
        collage.log({"loss": 1.0})
    assert caplog.text.count("log: no run has begun") == 1
    collage.init(transport=MemoryTransport())
    collage.finish()
    collage.log({"loss": 1.0})
    assert caplog.text.count("log: no run has begun") == 1, "after a run it is what is usual"


def test_beginning_starts_nothing_draws_nothing_and_loads_little_beside_torch():
    """In each rank: what colours a terminal, a solver of equations or torch's compiler take seconds to load."""
    code = """
        import numpy, random, socket, sys, threading, torch
        def numbers():
            return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
        def refuse(*arguments, **options):
            raise AssertionError("importing opened a socket")
        socket.socket.connect = refuse
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
        threads, before, drawn = threading.active_count(), set(sys.modules), numbers()
        from collage_agent import current_run, watch, init
        import collage_agent.integrations, collage_agent.optim, collage_agent.transport
        assert threading.active_count() == threads, threading.enumerate()
        assert current_run() is None
        added = {name.partition(".")[0] for name in set(sys.modules) - before}
        known = {"collage_agent", "collage_monitor", "collage_optim", "httpx", "msgspec", "ulid"}
        small = {"idna", "brotli", "_brotli", "numpy", "httpcore", "h11", "anyio", "certifi"}
        assert added <= known | small | set(sys.stdlib_module_names), added
        assert len(set(sys.modules) - before) <= 260, len(set(sys.modules) - before)
        import collage_agent
        assert [getattr(collage_agent, name) for name in collage_agent.__all__]
        assert numbers() == drawn
    """
    run_python(code, imports=TORCH)


def test_the_environment_replaces_defaults(transport, monkeypatch):
    told = {"PROJECT": "from-outside", "RUN_NAME": "the name", "RUN_ID": "run-7", "RUN_GROUP": "group"}
    for name, value in {**told, "TAGS": "a, b", "EVERY": "3", "SAMPLE": "all"}.items():
        monkeypatch.setenv(f"COLLAGE_{name}", value)
    run = collage.init(transport=transport)
    handle = by_default()
    assert (handle.options.every, handle.options.sample) == (3, "all")
    collage.finish()
    created = of_kind(transport, RunCreate)[0]
    assert (run.project, created.run_id, created.name) == ("from-outside", "run-7", "the name")
    assert (created.group, created.tags) == ("group", ["a", "b"])


@pytest.mark.parametrize(
    ("option", "given", "variable"),
    [("every", 10, "3"), ("sample", 4096, "128"), ("budget", 0.01, "0.5"), ("budget", None, "0.5")],
)
def test_what_equals_the_default_wins_too_when_it_is_passed(monkeypatch, option, given, variable):
    monkeypatch.setenv(f"COLLAGE_{option.upper()}", variable)
    assert getattr(by_default(**{option: given}).options, option) == given
    assert getattr(by_default().options, option) == float(variable)


def test_settings_that_equal_the_default_win_too_when_they_are_passed(monkeypatch):
    monkeypatch.setenv("COLLAGE_MODE", "disabled")
    monkeypatch.setenv("COLLAGE_TAGS", "from,outside")
    passed = collage.init(mode="online", tags=(), transport=MemoryTransport()).settings
    assert (passed.mode, passed.tags) == ("online", ())
    left_out = collage.init(transport=MemoryTransport()).settings
    assert (left_out.mode, left_out.tags) == ("disabled", ("from", "outside"))


def test_nonsense_in_the_environment_is_named_and_ignored(monkeypatch, caplog):
    nonsense = {
        "MODE": "sideways",
        "EVERY": "often",
        "SAMPLE": "3",
        "BUDGET": "-1",
        "RUN_ID": "a b",
        "SERVER_URL": "x",
    }
    for name, value in nonsense.items():
        monkeypatch.setenv(f"COLLAGE_{name}", value)
    run = collage.init(transport=MemoryTransport())
    options = by_default().options
    assert run.settings.mode == "online"
    assert (options.every, options.sample, options.budget) == (10, 4096, 0.01)
    named = {record.args[0] for record in caplog.records if record.args}
    assert named >= {f"COLLAGE_{name}" for name in nonsense}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "sideways"}, "mode='sideways' must be one of"),
        ({"resume": "maybe"}, "resume='maybe'"),
        ({"run_id": "with space"}, "run_id='with space'"),
        ({"run_id": "x" * 65}, "run_id="),
        ({"project": ""}, "project=''"),
        ({"project": ".."}, "project='..'"),
        ({"name": "x" * 513}, "name="),
        ({"tags": "one"}, "tags='one' must be a list"),
        ({"tags": ["t"] * 65}, "at most 64 texts"),
        ({"notes": 3}, "notes"),
        ({"seed": "seven"}, "seed='seven'"),
        ({"config": 3}, "config=3"),
        ({"config": {"x": "y" * 2**21}}, "config takes"),
        ({"server_url": "localhost:7420"}, "server_url='localhost:7420'"),
        ({"server_url": "http://me:secret@host"}, "server_url must be an http.*leave user and password out"),
        ({"token": "two words"}, "token must be the printable"),
        ({"token": "secret\n"}, "token must be the printable"),
        ({"run_id": "run\n"}, "run_id="),
    ],
)
def test_bad_arguments_raise_and_name_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        collage.init(**arguments)
    assert collage.current_run() is None


def test_configurations_of_all_sorts_are_kept(transport):
    class Namespace:
        def __init__(self):
            self.lr = 0.1
            self.dtype = torch.bfloat16

    with collage.init(config=Namespace(), transport=transport):
        pass
    with collage.init(config={"betas": (0.9, 0.99), 3: {"x": float("inf"), "big": 2**70}}, transport=transport):
        pass
    first, second = of_kind(transport, RunCreate)
    assert first.config == {"lr": 0.1, "dtype": "torch.bfloat16"}
    assert second.config == {"betas": [0.9, 0.99], "3": {"x": "inf", "big": str(2**70)}}


def test_a_script_that_forgets_finish_loses_nothing(tmp_path):
    code = """
        import collage_agent as collage
        collage.init(mode="offline", run_id="forgetful")
        for step in range(1, 101):
            collage.log({"loss": 1.0}, step=step)
    """
    assert "run forgetful: 100 reports wait in" in run_python(code).stdout
    transport = arrived(tmp_path)
    assert [report.step for report in transport.reports] == list(range(1, 101))
    assert transport.messages[-1] == RunUpdate(state="finished")


@pytest.mark.parametrize(
    ("ending", "status", "state"),
    [
        ("raise RuntimeError('diverged')", 1, "failed"),
        ("sys.exit(3)", 3, "failed"),
        ("exit('no data')", 1, "failed"),
        ("sys.exit(0)", 0, "finished"),
        ("sys.exit()", 0, "finished"),
        ("caught()", 0, "finished"),
    ],
)
def test_a_script_that_fails_marks_the_run_failed(tmp_path, ending, status, state):
    code = f"""
        import sys
        import collage_agent as collage
        def caught():
            try:
                sys.exit(3)
            except SystemExit:
                collage.log({{"loss": 2.0}})
        collage.init(mode="offline")
        collage.log({{"loss": 1.0}})
        {ending}
    """
    run_python(code, status=status)
    assert arrived(tmp_path).messages[-1] == RunUpdate(state=state)


def test_a_forked_child_reports_under_a_stream_of_its_own(tmp_path):
    code = """
        import os, time
        import collage_agent as collage
        run = collage.init(mode="offline", run_id="family")
        run.started(1)
        collage.log({"loss": 1.0}, step=1)
        while not run.reports_spooled:
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            collage.log({"loss": 2.0}, step=2)
            collage.finish()
            os._exit(0 if run.reports_spooled == 1 else 3)
        assert os.waitpid(child, 0)[1] == 0
        collage.log({"loss": 3.0}, step=3)
        collage.finish()
        assert run.reports_spooled == 2
    """
    run_python(code)
    transport = arrived(tmp_path)
    streams = of_kind(transport, StreamCreate)
    assert len({stream.stream_id for stream in streams}) == 2
    assert len({stream.process_id for stream in streams}) == 2
    assert {attempt.launch_id for attempt in of_kind(transport, AttemptCreate)} == {streams[0].launch_id}
    assert sorted(report.scalars["loss"] for report in transport.reports) == [1.0, 2.0, 3.0]
    assert len(of_kind(transport, RunUpdate)) == 1


def test_a_forked_child_that_reports_nothing_leaves_nothing(tmp_path):
    code = """
        import os, threading
        import collage_agent as collage
        collage.init(mode="offline", run_id="family")
        child = os.fork()
        if child == 0:
            os._exit(threading.active_count() - 1)
        assert os.waitpid(child, 0)[1] == 0
        collage.log({"loss": 1.0})
    """
    run_python(code)
    assert len(list(tmp_path.glob("spool/*/*.spool"))) == 1


def test_retries_draw_nothing_from_the_trainings_generators():
    run = collage.init(server_url=f"http://127.0.0.1:{free_port()}", token="x")
    training = Training()
    training.watch()
    random.seed(5)
    before = random.getstate()
    training.take(20)
    run.finish(seconds=PATIENCE_SECONDS)
    assert random.getstate() == before
    assert run.reports_spooled > 0
