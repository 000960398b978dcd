"""A run into memory: what is sent, when and in which order, what a report holds, and what a run says of itself."""

import dataclasses
import math
import os
import threading

import numpy as np
import pytest
import torch
from collage_agent.error_guard import raise_in_tests
from collage_agent.transport import MemoryTransport

from collage_monitor.local import LocalServer, announced
from collage_monitor.wire import AttemptCreate, ReportBatch, RunCreate, RunUpdate, StreamCreate, array_from_bytes
from tests.agent_delivery.doubles import (
    QUICK,
    HandleDouble,
    ServerDouble,
    ended_run,
    layout,
    log_steps,
    make_run,
    measurement,
    of_kind,
)
from tests.waiting import until


def told(transport):
    """(step, scalars) of all reports, in their order."""
    return [(report.step, report.scalars) for report in transport.reports]


def first_steps(transport):
    return [attempt.first_step for attempt in of_kind(transport, AttemptCreate)]


def model_of(report):
    return array_from_bytes(report.model, (report.statistic_count,))


def block(report):
    return array_from_bytes(report.statistics, (report.statistic_count, report.layer_count))


def test_registrations_precede_reports_and_after_the_end_which_is_marked_nothing_comes(tmp_path, transport):
    run = make_run(tmp_path, transport, project="p", name="n", tags=("t",), config={"lr": 0.1}, seed=3)
    run.started(5)
    run.measured(measurement(5))
    run.finish()
    run.log({"loss": 1.0})
    run.measured(measurement(6))
    kinds = [type(message) for message in transport.messages]
    assert kinds == [RunCreate, AttemptCreate, StreamCreate, StreamCreate, ReportBatch, RunUpdate]
    created, _, _, stream, _, update = transport.messages
    named = (created.run_id, created.name, created.tags, created.config, created.seed)
    assert named == (run.run_id, "n", ["t"], {"lr": 0.1}, 3)
    assert {envelope.project for envelope in transport.envelopes} == {"p"}
    assert [(attempt.first_step, attempt.role) for attempt in of_kind(transport, AttemptCreate)] == [(5, None)]
    assert [layer.name for layer in stream.layers] == ["a", "b"]
    assert stream.statistics == ["elements", "sampled", "intended_squared_sum"]
    assert stream.watch.optimizer == "SGD"
    assert update.state == "finished"
    assert (run.reports_sent, run.reports_dropped) == (1, {})


def test_a_report_holds_block_and_model(run, transport):
    totals = np.array([[1.0, 2.0], [3.0, math.nan], [math.nan, math.nan]])
    run.measured(measurement(7, totals=totals))
    run.finish()
    (report,) = transport.reports
    assert (report.seq, report.step, report.time) == (0, 7, 1007.0)
    assert report.scalars == {"agent_cpu_seconds": 0.5}
    np.testing.assert_array_equal(block(report), totals)
    np.testing.assert_array_equal(model_of(report), [3.0, 3.0, math.nan])


@pytest.mark.parametrize(("before", "steps"), [(False, [1, 2, 3]), (True, [1, 1, 2, 3])])
def test_scalars_of_a_measured_step_share_its_report(run, transport, before, steps):
    """Also where they are logged before it, but for the first, before which nobody knows that it is the first."""
    handle = HandleDouble()
    run.attach(handle)
    for step in (1, 2, 3):
        if before:
            run.log({"loss": 1.0 / step}, step=step)
        if step == 1:
            run.started(1)
        handle.step = step
        run.measured(measurement(step))
        if not before:
            run.log({"loss": 1.0 / step})
    run.finish()
    assert [(report.seq, report.step) for report in transport.reports] == list(enumerate(steps))
    assert [scalars["loss"] for _, scalars in told(transport) if "loss" in scalars] == [1.0, 0.5, 1.0 / 3.0]
    assert [report.step for report in transport.reports if report.statistics is not None] == [1, 2, 3]
    assert of_kind(transport, StreamCreate)[-1].measured_from == 1


def test_tensors_are_kept_as_they_were_when_logged_and_read_on_another_thread(run, transport, monkeypatch):
    readers = set()
    plain_item = torch.Tensor.item

    def watched_item(tensor):
        readers.add(threading.current_thread().name)
        return plain_item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", watched_item)
    loss = torch.tensor(2.0, requires_grad=True)
    run.log({"loss": loss, "half": torch.tensor([0.5], dtype=torch.bfloat16)}, step=3)
    with torch.no_grad():
        loss.fill_(9.0)
    run.finish()
    assert told(transport) == [(3, {"loss": 2.0, "half": 0.5})]
    assert readers == {"collage-agent"}


def test_what_is_no_number_is_left_out(run, transport, caplog):
    run.log({"loss": 1.0, "note": "text", "many": torch.zeros(3), "huge": 10**400, "nan": math.nan}, step=1)
    run.finish()
    (report,) = transport.reports
    assert report.scalars.keys() == {"loss", "nan"}
    assert math.isnan(report.scalars["nan"])
    assert {record.args[0] for record in caplog.records} == {"note", "many", "huge"}


def test_steps_are_counted_without_a_watch(run, transport):
    for loss in (3.0, 2.0, 1.0):
        run.log({"loss": loss})
    until(lambda: len(transport.reports) == 3)
    run.finish()
    assert [step for step, _ in told(transport)] == [1, 2, 3]
    assert first_steps(transport) == [1]


def test_what_is_logged_before_the_first_step_stands_just_before_it(run, transport):
    run.log({"validation_loss": 4.0})
    handle = HandleDouble()
    run.attach(handle)
    run.log({"validation_loss": 5.0})
    run.started(101)
    handle.step = 101
    run.log({"loss": 3.0})
    run.finish()
    assert first_steps(transport) == [101]
    assert dict(told(transport)) == {100: {"validation_loss": 5.0}, 101: {"loss": 3.0}}


@pytest.mark.slow
@pytest.mark.parametrize("entries", [3, 3000])
def test_what_waits_for_a_first_step_that_never_comes_is_bounded_and_kept(run, transport, entries):
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


def test_what_is_logged_at_steps_is_sent_while_the_run_goes_on_also_backwards_in_one_attempt(run, transport):
    run.log({"loss": 1.0}, step=7)
    until(lambda: told(transport) == [(7, {"loss": 1.0})])
    assert first_steps(transport) == [7]
    for step in (8, 3):
        log_steps(run, step, step)
    until(lambda: len(transport.reports) >= 2)
    run.finish()
    assert [step for step, _ in told(transport)] == [7, 8, 3]
    assert len(first_steps(transport)) == 1


def test_a_watch_that_comes_late_measures_from_its_own_first_step_on(run, transport):
    log_steps(run, 1, 500)
    until(lambda: len(transport.reports) == 500)
    run.attach(HandleDouble())
    run.started(101)
    run.measured(measurement(101))
    run.log({"loss": 0.5}, step=501)
    run.finish()
    assert first_steps(transport) == [1]
    streams = of_kind(transport, StreamCreate)
    assert [(bool(stream.statistics), stream.measured_from) for stream in streams] == [(False, None), (True, 101)]
    assert len({stream.stream_id for stream in streams}) == 1
    assert run.reports_dropped == {}


def test_a_watch_that_measures_rarely_holds_up_nothing(run, transport):
    handle = HandleDouble()
    run.attach(handle)
    run.started(1)
    for handle.step in range(1, 51):
        run.log({"loss": 1.0})
    until(lambda: len(transport.reports) >= 49)
    run.finish()
    assert [step for step, _ in told(transport)] == list(range(1, 51))


def test_a_growing_layout_extends_the_stream(run, transport):
    run.measured(measurement(1, layout(("a",), ("elements",))))
    until(lambda: len(transport.reports) == 1)
    run.measured(measurement(2, layout(("a", "b"), ("elements", "lost"))))
    run.finish()
    stream = of_kind(transport, StreamCreate)[-1]
    assert [layer.name for layer in stream.layers] == ["a", "b"]
    assert stream.statistics == ["elements", "lost"]
    assert [(report.statistic_count, report.layer_count) for report in transport.reports] == [(1, 1), (2, 2)]


def test_a_block_too_large_for_a_request_goes_in_parts_of_layers(run, transport, monkeypatch):
    monkeypatch.setattr("collage_agent.transport.report_maker._LARGEST_TOTALS_BYTES", 8 * 3 * 4)
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
    np.testing.assert_array_equal(np.sum([model_of(part) for part in parts], axis=0), totals.sum(axis=1))


SET_BACK = {100.0: 100.0, 101.0: 101.0, 100.9: 101.0, 41.0: 101.0, 42.0: 102.0, 44.0: 104.0}
SET_BACK_AGAIN = {30.0: 104.0, 31.0: 105.0, 500.0: 574.0}
"""The clock's times to the reports'."""


@pytest.mark.parametrize(
    ("steps", "clock", "times"),
    [
        (range(1, 10), [*SET_BACK, *SET_BACK_AGAIN], [*SET_BACK.values(), *SET_BACK_AGAIN.values()]),
        ([None, 1, 2], [100.0, 200.0, 300.0], [200.0, 300.0, 300.0]),
    ],
    ids=["set back", "what waited"],
)
def test_time_never_goes_backwards_and_keeps_its_pace(run, transport, monkeypatch, steps, clock, times):
    if None in steps:
        run.attach(HandleDouble())
    for step, now in zip(steps, clock, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr("collage_agent.run.time.time", lambda now=now: now)
            run.log({"loss": 1.0}, step=step)
    until(lambda: len(transport.reports) >= len(times) - 1)
    run.finish()
    assert [report.time for report in transport.reports] == times


def test_two_watches_fill_their_own_columns_even_under_one_name(run, transport):
    run.measured(measurement(1, layout(("weight",), ("elements",)), np.array([[4.0]])), 0)
    run.measured(measurement(1, layout(("weight",), ("elements", "lost")), np.array([[8.0], [2.0]])), 1)
    run.finish()
    stream = of_kind(transport, StreamCreate)[-1]
    assert [layer.name for layer in stream.layers] == ["weight", "weight (2)"]
    first, second = transport.reports
    assert (first.reports_of_step, second.reports_of_step) == (2, 2)
    np.testing.assert_array_equal(block(first), [[4.0]])
    np.testing.assert_array_equal(block(second), [[math.nan, 8.0], [math.nan, 2.0]])
    np.testing.assert_array_equal(model_of(second), [8.0, 2.0])


def test_a_large_batch_is_cut(tmp_path, transport):
    run = ended_run(tmp_path, 30, transport=transport, limits=dataclasses.replace(QUICK, batch_reports=8))
    assert max(len(batch.reports) for batch in of_kind(transport, ReportBatch)) <= 8
    assert [report.seq for report in transport.reports] == list(range(30))
    assert run.worker_cpu_seconds() > 0.0


def test_many_scalars_go_into_several_reports(run, transport):
    run.log({f"s{index}": index for index in range(450)}, step=1)
    run.finish()
    assert [len(report.scalars) for report in transport.reports] == [200, 200, 50]


def test_leaving_the_context_by_an_error_marks_the_run_failed(run, transport):
    def train():
        with run:
            run.log({"loss": 1.0}, step=1)
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        train()
    assert transport.messages[-1] == RunUpdate(state="failed")
    assert told(transport) == [(1, {"loss": 1.0})]


def test_refused_calls_of_log_do_not_claim_that_measuring_stopped(run, transport, caplog):
    raise_in_tests(False)
    for _ in range(5):
        run.log(3.0)
        run.log({"loss": 1.0}, step=torch.tensor(1))
        run.log({"loss": 1.0}, step=-1)
    run.log({"loss": 1.0}, step=1)
    run.finish()
    said = [record.getMessage() for record in caplog.records]
    assert ["step" in text for text in said] == [False, True, True]
    assert all("this call is left out" in text and "measuring goes on" in text for text in said)
    assert told(transport) == [(1, {"loss": 1.0})]


def test_reports_that_fail_do_not_claim_that_measuring_stopped(run, transport, caplog):
    raise_in_tests(False)
    for step in range(1, 6):
        run.measured(dataclasses.replace(measurement(step), totals=None))
    run.measured(measurement(6))
    run.finish()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("reporting a measured step failed (")
    assert said.endswith("); training is not affected")
    assert [step for step, _ in told(transport)] == [6]


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


def test_a_worker_error_is_counted_and_the_rest_goes_on(run, transport, caplog):
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
        log_steps(run, step, step)
        until(lambda step=step: run.reports_spooled == step)
    run.finish()
    assert run.reports_dropped == {}
    assert caplog.text.count("the transport failed") == 1
    caplog.clear()


def test_a_machine_without_room_for_a_thread_still_trains(tmp_path, transport, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    raise_in_tests(False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run = make_run(tmp_path, transport)
    run.started(1)
    run.log({"loss": 1.0})
    run.finish()
    assert run.reports_sent == 0


@pytest.mark.gpu
def test_log_does_not_wait_for_the_device(run, transport):
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
    assert [scalars for _, scalars in told(transport)] == [{"loss": 1.0}, {"loss": 3.0}]


def test_no_link_where_nothing_was_sent(tmp_path, server, capsys):
    run = ended_run(tmp_path, 0, name="empty", server_url=server.url)
    assert capsys.readouterr().out == "collage: run empty: nothing was sent\n"
    assert "href" not in run._repr_html_()


def test_finish_prints_the_verdict_once_and_how_to_look_at_the_run(tmp_path, server, capsys):
    """No page is known to answer beside a server alone: a link would open its API, which asks for a token."""
    run = make_run(tmp_path, name="baseline", server_url=server.url)
    run.attach(HandleDouble(3))
    run.log({"loss": 1.0})
    run.finish()
    printed = capsys.readouterr().out
    assert printed.count("the verdict") == 1
    assert f"run baseline ({run.run_id}) is at {server.url}; " in printed
    assert f"collage-monitor serve dashboard --server-url {server.url}" in printed
    assert "/run" not in printed
    run.finish()
    assert capsys.readouterr().out == ""


def test_finish_prints_the_page_where_a_dashboard_answers(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    dashboard = ServerDouble()
    try:
        with announced(LocalServer(server.url, dashboard.url, str(tmp_path), os.getpid())):
            run = ended_run(tmp_path, 1, name="baseline", server_url=server.url)
            assert run.address == f"{dashboard.url}/run/{run.run_id}"
            assert f'<iframe src="{run.address}?embed=curves"' in run._repr_html_()
        assert f"run baseline: {dashboard.url}/run/{run.run_id}\n" in capsys.readouterr().out
    finally:
        dashboard.close()


def test_a_run_shows_itself_in_a_notebook(tmp_path, transport):
    run = ended_run(tmp_path, 1, transport=transport, name="<b>", server_url="http://example.org:1/")
    shown = run._repr_html_()
    assert "&lt;b&gt;" in shown
    assert f'href="http://example.org:1/api/v1/runs/{run.run_id}"' in shown
    assert "iframe" not in shown
