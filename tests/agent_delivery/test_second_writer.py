"""A process that logs to a run beside its training: what it sends, what it never sends, and when it waits."""

import logging

import collage_agent as collage
import pytest
import torch
from collage_agent.launch.identity import make_identity
from collage_agent.run_settings import is_second_writers, read_settings
from collage_agent.transport import MemoryTransport
from collage_agent.transport.sender import send_folder
from torch import nn

from collage_monitor.errors import NotFound, ServerRefusal
from collage_monitor.wire import AttemptCreate, RunCreate, RunUpdate, StreamCreate
from tests.agent_delivery.doubles import NO_ENVIRONMENT, Scripted, ended_run, log_steps, make_run, of_kind
from tests.waiting import until


def beside(folder, transport=None, run_id="r1", **arguments):
    return make_run(folder, transport, run_id=run_id, role="evaluator", **arguments)


class Registry(MemoryTransport):
    """Takes attempts and streams of the runs that it knows alone, as a server does."""

    def __init__(self):
        super().__init__()
        self.runs = set()
        self.refused = 0

    def send(self, envelope, wait):
        if isinstance(envelope.body, RunCreate):
            self.runs.add(envelope.run_id)
        elif envelope.run_id not in self.runs:
            self.refused += 1
            raise NotFound(f"no run {envelope.run_id!r}", status=404)
        return super().send(envelope, wait)


def test_it_sends_its_launch_and_what_it_logs_under_its_role_and_leaves_the_run_alone(tmp_path, transport):
    run = beside(tmp_path, transport)
    run.log({"accuracy": 0.5}, step=5000)
    run.log({"accuracy": 0.4}, step=100)
    run.finish("failed")
    assert [(report.step, report.scalars) for report in transport.reports] == [
        (5000, {"evaluator/accuracy": 0.5}),
        (100, {"evaluator/accuracy": 0.4}),
    ]
    (attempt,) = of_kind(transport, AttemptCreate)
    assert (attempt.role, attempt.first_step) == ("evaluator", 100)
    (stream,) = of_kind(transport, StreamCreate)
    assert (stream.layers, stream.statistics, stream.watch, stream.rank, stream.world_size) == ([], [], None, 0, 1)
    assert of_kind(transport, RunCreate) == of_kind(transport, RunUpdate) == []


def test_a_dropped_report_is_counted_under_its_role(tmp_path):
    transport = Scripted(None, None, ServerRefusal("no", status=422))
    run = beside(tmp_path, transport)
    run.log({"accuracy": 0.5}, step=1)
    until(lambda: run.reports_dropped == {"refused_422": 1})
    run.log({"accuracy": 0.6}, step=2)
    run.finish()
    (report,) = transport.reports
    assert report.scalars == {"evaluator/accuracy": 0.6, "evaluator/reports_dropped": 1.0}


def test_it_waits_for_a_run_that_is_not_there_yet(tmp_path, capsys):
    """And for one that the server has lost, until that is registered again."""
    transport = Registry()
    run = beside(tmp_path, transport)
    log_steps(run, 10, 12)
    until(lambda: run.reports_spooled == 3 and transport.refused > 1)
    assert run.reports_dropped == {}
    trainer = make_run(tmp_path, transport, run_id="r1")
    until(lambda: run.reports_sent == 3)
    assert [report.step for report in transport.reports] == [10, 11, 12]
    assert "the server knows no run r1 yet" in capsys.readouterr().err
    transport.runs.clear()
    log_steps(run, 13, 13)
    until(lambda: run.reports_spooled == 1)
    transport.runs.add("r1")
    until(lambda: run.reports_sent == 4)
    run.finish()
    trainer.finish()
    assert run.reports_dropped == {}
    assert list(tmp_path.glob("spool/*/*")) == []


def test_what_it_left_is_sent_after_the_trainings_and_holds_up_no_other_run(tmp_path):
    left = [{"run_id": "never", "role": "evaluator"}, {"run_id": "r1", "role": "evaluator"}]
    for named in (*left, {"run_id": "r1"}, {"run_id": "r2"}):
        ended_run(tmp_path, 1, mode="offline", **named)
    transport = Registry()
    outcome = send_folder(tmp_path, transport, 0.0)
    sent = [(entry.run_id, entry.sent) for entry in outcome.spools]
    assert sent == [("r1", 1), ("r2", 1), ("never", 0), ("r1", 1)]
    assert "knows no run never" in (outcome.error or "")
    assert [path.parent.name for path in tmp_path.glob("spool/*/*")] == ["never"]
    names = [set(report.scalars) for report in transport.reports]
    assert names == [{"loss"}, {"loss"}, {"evaluator/loss"}]


def test_a_training_does_not_wait_for_what_an_evaluator_left(tmp_path, monkeypatch):
    """The evaluator's reports wait for the run, which that training registers."""
    ended_run(tmp_path, 1, mode="offline", run_id="r1", role="evaluator")
    transport = Registry()
    monkeypatch.setattr("collage_agent.transport.pipeline.HttpTransport", lambda *given, **more: transport)
    trainer = make_run(tmp_path, run_id="r1", server_url="http://127.0.0.1:1")
    log_steps(trainer, 1, 1)
    until(lambda: len(transport.reports) == 2)
    trainer.finish()
    assert sorted(name for report in transport.reports for name in report.scalars) == ["evaluator/loss", "loss"]
    assert trainer.reports_dropped == {}


def test_each_process_is_a_launch_by_itself_whatever_it_inherits():
    environment = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "8"}
    one, other = (make_identity("r1", environment=environment, role="evaluator") for _ in range(2))
    assert (one.rank, one.world_size, one.run_id) == (0, 1, "r1")
    child = one.in_child_process()
    assert len({one.launch_id, other.launch_id, child.launch_id}) == 3
    assert len({one.stream_id, other.stream_id, child.stream_id}) == 3
    assert child.role == "evaluator"
    assert all(is_second_writers(identity.stream_id) for identity in (one, other, child))
    assert not is_second_writers(make_identity("r1", environment=NO_ENVIRONMENT).stream_id)


@pytest.mark.parametrize("early", [False, True])
def test_what_it_watches_stays_here_and_is_told_once(tmp_path, transport, caplog, early):
    model = nn.Linear(8, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin():
        return collage.init(run_id="r1", role="evaluator", transport=transport, dir=tmp_path)

    def watch():
        return collage.watch(model, optimizer, every=1, budget=None)

    with caplog.at_level(logging.WARNING, logger="collage_agent"):
        handle = watch() if early else None
        begin()
        handle = handle or watch()
        watch()
        for step in range(3):
            model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            collage.log({"accuracy": step}, step=100 + step)
        collage.finish()
    told = [record.getMessage() for record in caplog.records if "is not reported" in record.getMessage()]
    assert len(told) == 1
    assert "run r1 as its evaluator" in told[0]
    assert handle.summary()["step"] == 3
    assert [report.statistics for report in transport.reports] == [None] * 3
    assert [report.step for report in transport.reports] == [100, 101, 102]


def test_it_writes_to_no_mirror(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLAGE_MIRRORS", "tensorboard")
    run = collage.init(run_id="r1", role="evaluator", transport=MemoryTransport(), dir=tmp_path)
    assert run.mirrors.counts == {}
    run.log({"accuracy": 1.0}, step=1)
    collage.finish()
    assert list(tmp_path.rglob("*tfevents*")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"role": "evaluator"}, "run_id"),
        ({"role": "Evaluator", "run_id": "r1"}, "role='Evaluator'"),
        ({"role": "", "run_id": "r1"}, "role=''"),
        ({"role": "a" * 25, "run_id": "r1"}, "24 lowercase"),
        ({"role": "evaluator", "run_id": "r1", "config": {"a": 1}}, "config"),
        ({"role": "evaluator", "run_id": "r1", "tags": ["a"]}, "tags"),
        ({"role": "evaluator", "run_id": "r1", "resume": "never"}, "resume"),
        ({"role": "evaluator", "run_id": "r1", "seed": 0}, "seed"),
    ],
)
def test_what_it_cannot_be_is_refused_with_the_next_action(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        read_settings(NO_ENVIRONMENT, dir=tmp_path, **arguments)


def test_the_run_may_be_named_by_the_environment(tmp_path):
    made = read_settings({"COLLAGE_RUN_ID": "r7", "COLLAGE_TAGS": "a,b"}, dir=tmp_path, role="evaluator")
    assert (made.run_id, made.second_role) == ("r7", "evaluator")
    assert read_settings(NO_ENVIRONMENT, dir=tmp_path, role="trainer").second_role is None
