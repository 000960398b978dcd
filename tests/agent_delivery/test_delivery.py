"""Delivery under random trouble: whatever fails, each report arrives, in order, and counts once."""

import random
from dataclasses import replace

import pytest
from collage_agent.transport import MemoryTransport
from collage_agent.transport.counts import ReportCounts
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.replay import Replay
from collage_agent.transport.spool import SpoolFile

from collage_monitor.errors import NotAuthorised, NotFound, ServerRefusal, ServerUnreachable, Unavailable
from collage_monitor.wire import (
    AttemptCreate,
    Report,
    ReportBatch,
    ReportGap,
    RunCreate,
    StreamCreate,
    decode_batch,
)
from tests.agent_delivery.doubles import QUICK, make_run, measurement
from tests.waiting import until

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


class Forgetful(Troubled):
    """Also refuses a long batch at random, or forgets the stream, until that is registered again."""

    knows_stream = newly_told = True

    def send(self, envelope, wait):
        if envelope.kind == "reports" and self.random.random() < 0.3:
            if len(envelope.body.reports) > 1:
                raise ServerRefusal("too long", status=413)
            self.knows_stream = self.newly_told
        if envelope.kind == "reports" and not self.knows_stream:
            raise NotFound("no such stream", status=404)
        answer = super().send(envelope, wait)
        self.newly_told = envelope.kind == "stream"
        self.knows_stream |= self.newly_told
        return answer


def first_arrivals(transport):
    seen: dict[int, int] = {}
    for report in transport.reports:
        seen.setdefault(report.seq, report.step)
    return seen


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", [Troubled, Forgetful])
def test_every_report_arrives_once_and_in_order(tmp_path, seed, share, kind):
    transport = kind(seed, share)
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


def replayed(folder):
    """What a calm server gets of the spools in a folder."""
    calm = MemoryTransport()
    replay = Replay(folder, folder / "none", calm, HASTY, lambda seconds: True)
    while replay.step(100):
        pass
    return calm


def gaps_of(transport):
    return [gap for message in transport.messages if isinstance(message, ReportBatch) for gap in message.gaps]


def numbers_in(gaps, reason):
    return [seq for gap in gaps if gap.reason == reason for seq in range(gap.first_seq, gap.last_seq + 1)]


def test_a_full_spool_is_counted_and_sent_as_a_numbered_gap(tmp_path):
    run = make_run(tmp_path, limits=replace(HASTY, spool_bytes=20_000), mode="offline")
    run.started(1)
    for step in range(1, 401):
        run.log({"loss": 1.0}, step=step)
        until(lambda step=step: len(run._pipeline.queue) <= 1)
    run.finish()
    dropped = run.reports_dropped["spool_full"]
    calm = replayed(tmp_path)
    lost = numbers_in(gaps_of(calm), "spool_full")
    arrived = [report.seq for report in calm.reports]
    assert len(lost) == dropped > 100
    assert sorted(lost + arrived) == list(range(arrived[-1] + 1))
    assert arrived == sorted(arrived)
    assert max(report.scalars.get("reports_dropped", 0.0) for report in calm.reports) == dropped


@pytest.mark.parametrize("status", [400, 422])
def test_what_the_server_refuses_for_good_is_a_gap(tmp_path, server, status):
    run = make_run(tmp_path, server_url=server.url)
    run.started(1)
    run.log({"loss": 1.0}, step=1)
    until(lambda: run.reports_sent == 1)
    server.script = [status]
    run.log({"loss": 1.0}, step=2)
    until(lambda: run.reports_dropped == {f"refused_{status}": 1})
    run.log({"loss": 1.0}, step=3)
    run.finish()
    batches = [decode_batch(body) for _, path, _, body in server.requests if path.endswith("/reports")]
    assert [gap for batch in batches for gap in batch.gaps] == [
        ReportGap(first_seq=1, last_seq=1, reason=f"refused_{status}")
    ]


def test_a_damaged_spool_arrives_without_what_was_damaged(tmp_path):
    run = make_run(tmp_path, limits=replace(HASTY, batch_reports=1), mode="offline")
    run.started(1)
    for step in range(1, 11):
        run.log({"loss": 1.0}, step=step)
        until(lambda step=step: run.reports_spooled == step)
    run.finish()
    (path,) = tmp_path.glob("spool/*/*.spool")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    calm = replayed(tmp_path)
    (gap,) = gaps_of(calm)
    assert (gap.first_seq, gap.reason) == (gap.last_seq, "spool_damaged")
    assert sorted([report.seq for report in calm.reports] + [gap.first_seq]) == list(range(10))
    assert list(tmp_path.glob("spool/*")) == []


class Scripted(MemoryTransport):
    """Raises what its script says for the next messages, None where it takes one."""

    def __init__(self, *script):
        super().__init__()
        self.script = list(script)

    def send(self, envelope, wait):
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        return super().send(envelope, wait)


class Sender:
    """A delivery of `reports` reports in batches of four, and its accounts."""

    def __init__(self, folder, transport, reports, *, spooled):
        self.transport = transport
        self.counts = ReportCounts()
        self.counts.add(reports)
        self.delivery = Delivery(transport, SpoolFile(folder / "own.spool"), QUICK, self.counts, clock=lambda: 0.0)
        self.delivery.older_spools_first = spooled
        self.send(RunCreate(run_id="run"))
        for first in range(0, reports, 4):
            batch = [Report(seq=seq, step=seq, time=1.0, scalars={"loss": 1.0}) for seq in range(first, first + 4)]
            self.send(ReportBatch(reports=batch))
        self.delivery.older_spools_first = False

    def send(self, body):
        self.delivery.send(Envelope("project", "run", "stream", body))

    @property
    def places(self):
        counts = self.counts
        assert counts.made == counts.pending + counts.spooled + counts.sent + sum(counts.dropped.values())
        return {"pending": counts.pending, "spooled": counts.spooled, "sent": counts.sent, **counts.dropped}

    @property
    def arrived(self):
        return [report.seq for report in self.transport.reports]


TOO_LONG = ServerRefusal("too long", status=413)
LOST = NotFound("no such stream", status=404)
LATER = [
    ServerUnreachable("connection lost"),
    Unavailable("busy", status=503),
    Unavailable("too many requests", status=429),
    NotAuthorised("not now", status=401),
]


@pytest.mark.parametrize("spooled", [False, True])
@pytest.mark.parametrize(
    ("script", "sent"),
    [([], 0), ([None], 2), ([TOO_LONG, None], 1), ([None, TOO_LONG], 2), ([None, TOO_LONG, None], 3)],
    ids=["first half", "second half", "first half's second", "second half's first", "second half's second"],
)
def test_a_half_that_must_be_sent_later_holds_up_what_follows(tmp_path, script, sent, spooled):
    error = Unavailable("busy", status=503)
    transport = Scripted(None, TOO_LONG, *script, error)
    sender = Sender(tmp_path, transport, 8, spooled=spooled)
    if spooled:
        assert sender.delivery.drain(1)
        assert not sender.delivery.drain(1)
    assert (sender.delivery.last_error, sender.delivery.is_waiting) == (error, True)
    assert sender.arrived == list(range(sent))
    assert sender.places == {"pending": 0, "spooled": 8 - sent, "sent": sent}
    assert sender.delivery.drain(10, now=True)
    assert sender.arrived == list(range(8))
    assert sender.places == {"pending": 0, "spooled": 0, "sent": 8}
    assert (sender.delivery.last_error, sender.delivery.spool.is_empty) == (None, True)


@pytest.mark.parametrize("error", LATER, ids=str)
@pytest.mark.parametrize("registered", [False, True], ids=["while registering again", "at the repeat"])
def test_a_server_that_lost_the_stream_and_is_busy_is_told_later(tmp_path, error, registered):
    transport = Scripted(None, LOST, *[None] * registered, error)
    sender = Sender(tmp_path, transport, 8, spooled=False)
    assert (sender.delivery.last_error, sender.delivery.is_waiting) == (error, True)
    assert sender.places == {"pending": 0, "spooled": 8, "sent": 0}
    assert sender.delivery.drain(10, now=True)
    assert sender.arrived == list(range(8))
    assert sender.places == {"pending": 0, "spooled": 0, "sent": 8}


@pytest.mark.parametrize(
    ("script", "reason"), [([LOST], "refused_404"), ([None, LOST], "refused_404")], ids=["run", "reports"]
)
def test_a_server_that_does_not_take_the_stream_again_refuses_its_reports(tmp_path, script, reason):
    sender = Sender(tmp_path, Scripted(None, LOST, *script), 8, spooled=False)
    assert sender.places == {"pending": 0, "spooled": 0, "sent": 4, reason: 4}
    assert sender.arrived == [4, 5, 6, 7]
    assert gaps_of(sender.transport) == [ReportGap(first_seq=0, last_seq=3, reason=reason)]


def test_nothing_is_sent_once_half_a_batch_has_heard_that_the_run_was_deleted(tmp_path):
    sender = Sender(tmp_path, Scripted(None, TOO_LONG, NotFound("deleted", status=410)), 8, spooled=False)
    assert sender.arrived == []
    assert sender.places == {"pending": 0, "spooled": 0, "sent": 0, "run_deleted": 8}


def test_reports_found_too_long_after_the_stream_was_told_again_go_in_halves(tmp_path):
    sender = Sender(tmp_path, Scripted(None, LOST, None, TOO_LONG), 8, spooled=False)
    assert sender.arrived == list(range(8))
    assert sender.places == {"pending": 0, "spooled": 0, "sent": 8}
