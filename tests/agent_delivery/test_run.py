"""A run into memory: what is sent, in which order, and what a report holds."""

import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
from collage_agent.error_guard import raise_in_tests
from collage_agent.transport import MemoryTransport

from collage_monitor.wire import (
    AttemptCreate,
    ReportBatch,
    RunCreate,
    RunUpdate,
    StreamCreate,
    array_from_bytes,
)
from tests.agent_delivery.doubles import QUICK, HandleDouble, layout, make_run, measurement
from tests.waiting import until


def kinds(transport):
    return [type(message) for message in transport.messages]


def model_of(report):
    return array_from_bytes(report.model, (report.statistic_count,))


def block(report):
    return array_from_bytes(report.statistics, (report.statistic_count, report.layer_count))


def test_registrations_precede_reports_and_the_end_is_marked(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport, project="p", name="n", tags=("t",), config={"lr": 0.1}, seed=3)
    run.started(5)
    run.measured(measurement(5))
    run.finish()
    assert kinds(transport) == [RunCreate, AttemptCreate, StreamCreate, StreamCreate, ReportBatch, RunUpdate]
    created, attempt, _, stream, _, update = transport.messages
    assert isinstance(created, RunCreate)
    assert (created.run_id, created.name, created.tags, created.config, created.seed) == (
        run.run_id,
        "n",
        ["t"],
        {"lr": 0.1},
        3,
    )
    assert {envelope.project for envelope in transport.envelopes} == {"p"}
    assert isinstance(attempt, AttemptCreate)
    assert attempt.first_step == 5
    assert isinstance(stream, StreamCreate)
    assert [layer.name for layer in stream.layers] == ["a", "b"]
    assert stream.statistics == ["elements", "sampled", "intended_squared_sum"]
    assert stream.watch is not None
    assert stream.watch.optimizer == "SGD"
    assert isinstance(update, RunUpdate)
    assert update.state == "finished"
    assert run.reports_sent == 1
    assert run.reports_dropped == {}


def test_a_report_holds_block_and_model(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    totals = np.array([[1.0, 2.0], [3.0, math.nan], [math.nan, math.nan]])
    run.measured(measurement(7, totals=totals))
    run.finish()
    (report,) = transport.reports
    assert (report.seq, report.step, report.time) == (0, 7, 1007.0)
    assert report.scalars == {"agent_cpu_seconds": 0.5}
    np.testing.assert_array_equal(block(report), totals)
    np.testing.assert_array_equal(model_of(report), [3.0, 3.0, math.nan])


def test_scalars_of_a_measured_step_share_its_report(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    handle = HandleDouble()
    run.attach(handle)
    run.started(1)
    for step in (1, 2):
        run.measured(measurement(step))
        handle.step = step
        run.log({"loss": 1.0 / step})
    run.finish()
    assert [(report.seq, report.step) for report in transport.reports] == [(0, 1), (1, 2)]
    assert [report.scalars["loss"] for report in transport.reports] == [1.0, 0.5]
    assert all(report.statistics is not None for report in transport.reports)


def test_tensors_are_kept_as_they_were_when_logged(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    loss = torch.tensor(2.0, requires_grad=True)
    run.log({"loss": loss, "half": torch.tensor([0.5], dtype=torch.bfloat16)}, step=3)
    with torch.no_grad():
        loss.fill_(9.0)
    run.finish()
    assert [(report.step, report.scalars) for report in transport.reports] == [(3, {"loss": 2.0, "half": 0.5})]


def test_log_reads_no_tensor_on_the_calling_thread(tmp_path, monkeypatch):
    readers = set()
    plain_item = torch.Tensor.item

    def watched_item(tensor):
        readers.add(threading.current_thread().name)
        return plain_item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", watched_item)
    run = make_run(tmp_path, MemoryTransport())
    run.log({"loss": torch.tensor(1.0)}, step=1)
    run.finish()
    assert readers == {"collage-agent"}


def test_what_is_no_number_is_left_out(tmp_path, caplog):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.log({"loss": 1.0, "note": "text", "many": torch.zeros(3), "huge": 10**400, "nan": math.nan}, step=1)
    run.finish()
    (report,) = transport.reports
    assert report.scalars.keys() == {"loss", "nan"}
    assert math.isnan(report.scalars["nan"])
    assert {record.args[0] for record in caplog.records} == {"note", "many", "huge"}


def test_steps_are_counted_without_a_watch(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    for loss in (3.0, 2.0, 1.0):
        run.log({"loss": loss})
    until(lambda: len(transport.reports) == 3)
    run.finish()
    assert [report.step for report in transport.reports] == [1, 2, 3]
    assert next(m for m in transport.messages if isinstance(m, AttemptCreate)).first_step == 1


def test_what_is_logged_before_the_first_step_stands_just_before_it(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.log({"validation_loss": 4.0})
    handle = HandleDouble()
    run.attach(handle)
    run.log({"validation_loss": 5.0})
    run.started(101)
    handle.step = 101
    run.log({"loss": 3.0})
    run.finish()
    attempts = [message for message in transport.messages if isinstance(message, AttemptCreate)]
    assert [attempt.first_step for attempt in attempts] == [101]
    merged = {report.step: report.scalars for report in transport.reports}
    assert merged == {100: {"validation_loss": 5.0}, 101: {"loss": 3.0}}


def test_a_growing_layout_extends_the_stream(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.measured(measurement(1, layout(("a",), STATISTICS_BEFORE)))
    until(lambda: len(transport.reports) == 1)
    run.measured(measurement(2, layout(("a", "b"), (*STATISTICS_BEFORE, "lost"))))
    run.finish()
    streams = [message for message in transport.messages if isinstance(message, StreamCreate)]
    assert [layer.name for layer in streams[-1].layers] == ["a", "b"]
    assert streams[-1].statistics == [*STATISTICS_BEFORE, "lost"]
    assert [(report.statistic_count, report.layer_count) for report in transport.reports] == [(1, 1), (2, 2)]


STATISTICS_BEFORE = ("elements",)


def test_a_block_too_large_for_a_request_goes_in_parts_of_layers(tmp_path, monkeypatch):
    monkeypatch.setattr("collage_agent.transport.report_maker._LARGEST_TOTALS_BYTES", 8 * 3 * 4)
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    names = [f"layer.{number}" for number in range(10)]
    totals = np.random.default_rng(0).integers(1, 100, (3, 10)).astype(np.float64)
    run.measured(measurement(7, layout(names), totals))
    run.log({"loss": 1.0}, step=7)
    run.finish()
    parts = transport.reports
    assert [(part.seq, part.step, part.layer_count) for part in parts] == [(0, 7, 4), (1, 7, 8), (2, 7, 10)]
    assert [part.reports_of_step for part in parts] == [3, 3, 3]
    assert [sorted(part.scalars) for part in parts] == [["agent_cpu_seconds", "loss"], [], []]
    for number, part in enumerate(parts):
        found = block(part)
        assert np.isnan(found[:, : 4 * number]).all()
        np.testing.assert_array_equal(found[:, 4 * number :], totals[:, 4 * number : 4 * number + 4])
    models = [array_from_bytes(part.model or b"", (3,)) for part in parts]
    np.testing.assert_array_equal(np.sum(models, axis=0), totals.sum(axis=1))


def test_time_never_goes_backwards_and_keeps_its_pace(tmp_path, monkeypatch):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    clock = iter([100.0, 101.0, 100.9, 41.0, 42.0, 44.0, 30.0, 31.0, 500.0])
    for step in range(1, 10):
        with monkeypatch.context() as patch:
            now = next(clock)
            patch.setattr("collage_agent.run.time.time", lambda now=now: now)
            run.log({"loss": 1.0}, step=step)
    run.finish()
    times = [report.time for report in transport.reports]
    assert times == [100.0, 101.0, 101.0, 101.0, 102.0, 104.0, 104.0, 105.0, 574.0]


def test_two_watches_fill_their_own_columns_even_under_one_name(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.measured(measurement(1, layout(("weight",), ("elements",)), np.array([[4.0]])), 0)
    run.measured(measurement(1, layout(("weight",), ("elements", "lost")), np.array([[8.0], [2.0]])), 1)
    run.finish()
    stream = [message for message in transport.messages if isinstance(message, StreamCreate)][-1]
    assert [layer.name for layer in stream.layers] == ["weight", "weight (2)"]
    first, second = transport.reports
    assert (first.reports_of_step, second.reports_of_step) == (2, 2)
    np.testing.assert_array_equal(block(first), [[4.0]])
    np.testing.assert_array_equal(block(second), [[math.nan, 8.0], [math.nan, 2.0]])
    np.testing.assert_array_equal(model_of(second), [8.0, 2.0])


def test_a_large_batch_is_cut(tmp_path):
    transport = MemoryTransport()
    limits = type(QUICK)(**{**QUICK.__dict__, "batch_reports": 8})
    run = make_run(tmp_path, transport, limits=limits)
    for step in range(1, 31):
        run.log({"loss": 1.0}, step=step)
    run.finish()
    sizes = [len(message.reports) for message in transport.messages if isinstance(message, ReportBatch)]
    assert sum(sizes) == 30
    assert max(sizes) <= 8
    assert [report.seq for report in transport.reports] == list(range(30))


def test_many_scalars_go_into_several_reports(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.log({f"s{index}": index for index in range(450)}, step=1)
    run.finish()
    assert [len(report.scalars) for report in transport.reports] == [200, 200, 50]


def test_leaving_the_context_by_an_error_marks_the_run_failed(tmp_path):
    transport = MemoryTransport()

    def train():
        with make_run(tmp_path, transport) as run:
            run.log({"loss": 1.0}, step=1)
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        train()
    assert transport.messages[-1] == RunUpdate(state="failed")
    assert [report.scalars for report in transport.reports] == [{"loss": 1.0}]


def test_refused_calls_of_log_do_not_claim_that_measuring_stopped(tmp_path, caplog):
    raise_in_tests(False)
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    for _ in range(5):
        run.log(3.0)
        run.log({"loss": 1.0}, step=torch.tensor(1))
        run.log({"loss": 1.0}, step=-1)
    run.log({"loss": 1.0}, step=1)
    run.finish()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert all("this call is left out" in text and "measuring goes on" in text for text in told)
    assert [report.scalars for report in transport.reports] == [{"loss": 1.0}]


def test_reports_that_fail_do_not_claim_that_measuring_stopped(tmp_path, caplog):
    raise_in_tests(False)
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    for step in range(1, 6):
        run.measured(dataclasses.replace(measurement(step), totals=None))
    run.measured(measurement(6))
    run.finish()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("reporting a measured step failed (")
    assert told.endswith("); training is not affected")
    assert [report.step for report in transport.reports] == [6]


def test_nothing_is_reported_after_the_end(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.finish()
    run.log({"loss": 1.0})
    run.measured(measurement(1))
    assert transport.reports == []


def test_a_disabled_run_has_no_thread_and_no_file(tmp_path):
    before = threading.active_count()
    run = make_run(tmp_path, mode="disabled")
    run.started(1)
    run.measured(measurement(1))
    run.log({"loss": 1.0})
    assert threading.active_count() == before
    run.finish()
    assert list(tmp_path.iterdir()) == []
    assert (run.reports_sent, run.reports_spooled, run.reports_dropped) == (0, 0, {})


@pytest.mark.parametrize("step", [-1, torch.tensor(3)])
def test_a_step_that_makes_no_sense_reaches_the_guard(tmp_path, step):
    run = make_run(tmp_path, MemoryTransport())
    with pytest.raises((TypeError, ValueError), match="step"):
        run.log({"loss": 1.0}, step=step)
    run.finish()


def test_delivering_counts_its_own_time(tmp_path):
    run = make_run(tmp_path, MemoryTransport())
    for step in range(200):
        run.log({"loss": 1.0}, step=step)
    run.finish()
    assert run.worker_cpu_seconds() > 0.0


def test_a_worker_error_is_counted_and_the_rest_goes_on(tmp_path, caplog):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    run.measured(measurement(1, totals=np.zeros((1, 1))))
    until(lambda: run.reports_dropped == {"worker_error": 1})
    run.measured(measurement(2))
    run.finish()
    assert [report.step for report in transport.reports if report.statistics] == [2]
    assert "training goes on" in caplog.text
    caplog.clear()


def test_a_transport_that_breaks_in_its_own_way_is_named_once(tmp_path, caplog):
    class Broken(MemoryTransport):
        def send(self, envelope, wait):
            raise KeyError("not an error of ours")

    run = make_run(tmp_path, Broken())
    run.started(1)
    for step in range(1, 4):
        run.log({"loss": 1.0}, step=step)
        until(lambda step=step: run.reports_spooled == step)
    run.finish()
    assert run.reports_dropped == {}
    assert caplog.text.count("the transport failed") == 1
    caplog.clear()


def test_a_machine_without_room_for_a_thread_still_trains(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    raise_in_tests(False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run = make_run(tmp_path, MemoryTransport())
    run.started(1)
    run.log({"loss": 1.0})
    run.finish()
    assert run.reports_sent == 0


@pytest.mark.gpu
def test_log_does_not_wait_for_the_device(tmp_path):
    transport = MemoryTransport()
    run = make_run(tmp_path, transport)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # CUDA loads a kernel when it is first used, and waits for the device then.
        run.log({"loss": torch.full((), 1.0, device="cuda")}, step=0)
        stream.synchronize()
        torch.cuda._sleep(2_000_000_000)
        loss = torch.full((), 3.0, device="cuda")
        run.log({"loss": loss}, step=1)
        assert not stream.query()
    run.finish()
    assert [report.scalars for report in transport.reports] == [{"loss": 1.0}, {"loss": 3.0}]
