"""Delivery under random trouble: whatever fails, each report arrives, in order, and counts once."""

import random
from dataclasses import replace

import pytest
from collage_agent.transport import MemoryTransport
from collage_agent.transport.replay import Replay

from collage_monitor.errors import NotAuthorised, ServerUnreachable, Unavailable
from collage_monitor.wire import AttemptCreate, ReportBatch, RunCreate, StreamCreate
from tests.agent_delivery.doubles import QUICK, make_run, measurement

HASTY = replace(QUICK, first_pause_seconds=0.001, longest_pause_seconds=0.002, linger_seconds=0.0, batch_reports=3)


class Troubled(MemoryTransport):
    """Fails at random: before the message arrives, or after, so that the answer is lost."""

    def __init__(self, seed, share):
        super().__init__()
        self.random = random.Random(seed)
        self.share = share
        self.failures = 0

    def send(self, envelope, wait):
        if self.random.random() >= self.share:
            return super().send(envelope, wait)
        self.failures += 1
        if self.random.random() < 0.5:
            super().send(envelope, wait)
        raise self.random.choice(
            [
                ServerUnreachable("connection lost"),
                Unavailable("busy", status=503, retry_after_seconds=0.01),
                NotAuthorised("not now", status=401),
            ]
        )


def first_arrivals(transport):
    seen: dict[int, int] = {}
    for report in transport.reports:
        seen.setdefault(report.seq, report.step)
    return seen


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_every_report_arrives_once_and_in_order(tmp_path, seed, share):
    transport = Troubled(seed, share)
    run = make_run(tmp_path, transport, limits=HASTY)
    run.started(1)
    for step in range(1, 101):
        run.log({"loss": float(step)}, step=step)
        if step % 10 == 0:
            run.measured(measurement(step))
    run.finish()
    made = run.reports_sent + run.reports_spooled
    assert run.reports_dropped == {}
    # What the run had to leave, the next one sends.
    calm = MemoryTransport()
    calm.envelopes, calm._seen = list(transport.envelopes), set(transport._seen)
    replay = Replay(tmp_path, tmp_path / "none", calm, HASTY, lambda seconds: True)
    while replay.step(100):
        pass
    arrived = first_arrivals(calm)
    assert list(arrived) == list(range(made))
    assert list(arrived.values()) == sorted(arrived.values())
    assert set(arrived.values()) == set(range(1, 101))
    assert transport.failures > 0


def test_introductions_always_precede_what_they_introduce(tmp_path):
    for seed in range(5):
        transport = Troubled(seed, 0.4)
        run = make_run(tmp_path / str(seed), transport, limits=HASTY)
        for step in range(1, 30):
            run.measured(measurement(step))
        run.finish()
        kinds = [type(message) for message in transport.messages]
        if ReportBatch in kinds:
            firsts = [kinds.index(kind) for kind in (RunCreate, AttemptCreate, StreamCreate, ReportBatch)]
            assert firsts == sorted(firsts)
