"""Runs that only log, and what is logged beside a watch: nothing waits for the end of the run."""

import pytest
import torch
from collage_agent.transport import MemoryTransport

from collage_monitor.wire import AttemptCreate, StreamCreate
from tests.agent_delivery.doubles import QUICK, HandleDouble, make_run, measurement
from tests.waiting import until


def told(transport):
    """(step, scalars) of all reports, in their order."""
    return [(report.step, report.scalars) for report in transport.reports]


def of_kind(transport, kind):
    return [message for message in transport.messages if isinstance(message, kind)]


def test_what_is_logged_at_steps_is_sent_while_the_run_goes_on(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.log({"loss": 1.0}, step=7)
    until(lambda: told(transport) == [(7, {"loss": 1.0})])
    assert [attempt.first_step for attempt in of_kind(transport, AttemptCreate)] == [7]
    run.log({"loss": 0.5}, step=8)
    until(lambda: len(transport.reports) == 2)
    run.finish()
    assert len(of_kind(transport, AttemptCreate)) == 1


def test_many_steps_in_no_time_are_all_sent(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport, limits=type(QUICK)())
    for step in range(1, 3001):
        run.log({"loss": 1.0 / step}, step=step)
    run.finish()
    assert run.reports_dropped == {}
    assert [step for step, _ in told(transport)] == list(range(1, 3001))


def test_steps_that_go_backwards_stay_in_one_attempt(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    for step in (5, 10, 3):
        run.log({"accuracy": float(step)}, step=step)
    run.finish()
    assert [step for step, _ in told(transport)] == [5, 10, 3]
    assert len(of_kind(transport, AttemptCreate)) == 1


def test_a_watch_that_comes_late_measures_from_its_own_first_step_on(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    for step in range(1, 501):
        run.log({"loss": 1.0}, step=step)
    until(lambda: len(transport.reports) == 500)
    run.attach(HandleDouble())
    run.started(101)
    run.measured(measurement(101))
    run.log({"loss": 0.5}, step=501)
    run.finish()
    assert [attempt.first_step for attempt in of_kind(transport, AttemptCreate)] == [1]
    streams = [(stream.statistics != [], stream.measured_from) for stream in of_kind(transport, StreamCreate)]
    assert streams == [(False, None), (True, 101)]
    assert len({stream.stream_id for stream in of_kind(transport, StreamCreate)}) == 1
    assert run.reports_dropped == {}


def test_the_loss_is_logged_before_the_step_is_taken(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    handle = HandleDouble()
    run.attach(handle)
    for step in (1, 2, 3):
        run.log({"loss": 1.0}, step=step)
        if step == 1:
            run.started(1)
        handle.step = step
        run.measured(measurement(step))
    run.finish()
    assert sorted({report.step for report in transport.reports}) == [1, 2, 3]
    assert all(step > 0 for step, _ in told(transport))
    assert of_kind(transport, StreamCreate)[-1].measured_from == 1


def test_a_watch_that_measures_rarely_holds_up_nothing(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    handle = HandleDouble()
    run.attach(handle)
    run.started(1)
    for handle.step in range(1, 51):
        run.log({"loss": 1.0})
    until(lambda: len(transport.reports) >= 49)
    run.finish()
    assert [step for step, _ in told(transport)] == list(range(1, 51))


@pytest.mark.parametrize("entries", [3, 3000])
def test_what_waits_for_a_first_step_that_never_comes_is_bounded_and_kept(tmp_path, entries):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.attach(HandleDouble())
    for number in range(entries):
        run.log({"loss": torch.tensor(float(number)), f"name {number % 7}": number})
    run.log({"accuracy": 0.5}, step=20)
    until(lambda: (20, {"accuracy": 0.5}) in told(transport))
    run.finish()
    assert run.reports_dropped == {}
    (last,) = [scalars for step, scalars in told(transport) if step == 19]
    assert last["loss"] == entries - 1
    assert len(last) == 1 + min(entries, 7)
    assert run.reports_made == run.reports_sent == len(transport.reports)


def test_what_waited_does_not_set_the_clock_back(tmp_path, monkeypatch):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.attach(HandleDouble())
    clock = iter([100.0, 200.0, 300.0])
    for number, step in enumerate((None, 1, 2)):
        with monkeypatch.context() as patch:
            now = next(clock)
            patch.setattr("collage_agent.run.time.time", lambda now=now: now)
            run.log({"loss": float(number)}, step=step)
    until(lambda: len(transport.reports) == 2)
    run.finish()
    assert [report.time for report in transport.reports] == [200.0, 300.0, 300.0]
