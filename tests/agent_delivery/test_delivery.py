"""Delivery in trouble: what becomes of single messages. The law of all of them is in `test_laws.py`."""

from dataclasses import replace

import pytest
from collage_agent.transport import report_log
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.report_counts import ReportCounts
from collage_agent.transport.report_log import ReportLog
from collage_agent.transport.sender import Sender

from collage_monitor.errors import NotAuthorised, NotFound, ServerRefusal, ServerUnreachable, Unavailable
from collage_monitor.wire import Report, ReportBatch, ReportGap, RunCreate
from tests.agent_delivery.doubles import QUICK, Scripted, arrived, log_steps, make_run, of_kind
from tests.agent_delivery.stepped import RUN_ID, Clock, Disk, Process, UnreliableServer, patch_surroundings
from tests.waiting import until

HASTY = replace(QUICK, first_pause_seconds=0.001, longest_pause_seconds=0.002, linger_seconds=0.0, batch_reports=3)


def test_what_gave_way_to_a_record_that_could_not_be_written_is_counted(tmp_path, transport, monkeypatch):
    stream = Stream(tmp_path, transport, 0, spooled=True, spool_bytes=4_000)
    stream.held = True
    shorten, write = ReportLog._shorten, report_log._write_all

    def full(descriptor, data, offset):
        raise OSError("no space left")

    def shorten_and_fill(log):
        shorten(log)
        monkeypatch.setattr(report_log, "_write_all", full)

    monkeypatch.setattr(ReportLog, "_shorten", shorten_and_fill)
    seq = 0
    while report_log._write_all is write:
        stream.report(seq)
        seq += 1
    dropped = stream.counts.dropped
    assert dropped["spool_failed"] == 1
    assert dropped["spool_full"] > 5
    stream.held = False
    assert stream.sender.send_all(lambda sender: False)
    assert stream.arrived == list(range(dropped["spool_full"], seq - 1))
    assert stream.places == {"pending": 0, "spooled": 0, "sent": len(stream.arrived), **dropped}


def test_torn_spools_of_the_same_run_do_not_keep_what_the_run_has(tmp_path, monkeypatch):
    """A turn of the worker takes one of them away, the end of the run the other."""
    clock = Clock()
    patch_surroundings(monkeypatch, clock, Disk(), UnreliableServer(clock))
    for stream_id in ("earlier", "earliest"):
        path = report_log.spool_path(tmp_path, RUN_ID, stream_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(report_log._MAGIC + b"torn")
    process = Process(tmp_path, offline=False)
    process.begin(1)
    process.log("item", 1)
    process.finish("finished")
    assert (process.run.reports_sent, process.run.reports_spooled) == (1, 0)


def gaps_of(transport):
    return [gap for batch in of_kind(transport, ReportBatch) for gap in batch.gaps]


def batch_of(first, count):
    return [Report(seq=seq, step=seq, time=1.0, scalars={"loss": 1.0}) for seq in range(first, first + count)]


def test_a_damaged_spool_arrives_without_what_was_damaged(tmp_path):
    run = make_run(tmp_path, limits=replace(HASTY, batch_reports=1), mode="offline")
    run.started(1)
    for step in range(1, 11):
        log_steps(run, step, step)
        until(lambda step=step: run.reports_spooled == step)
    run.finish()
    (path,) = tmp_path.glob("spool/*/*.spool")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    calm = arrived(tmp_path)
    (gap,) = gaps_of(calm)
    assert (gap.first_seq, gap.reason) == (gap.last_seq, "spool_damaged")
    assert sorted([report.seq for report in calm.reports] + [gap.first_seq]) == list(range(10))
    assert list(tmp_path.glob("spool/*")) == []


class Stream:
    """A sender of `reports` reports in batches of four, and its accounts."""

    def __init__(self, folder, transport, reports, *, spooled, spool_bytes=2**30):
        self.transport = transport
        self.counts = ReportCounts()
        self.counts.add(reports)
        self.held = spooled
        log = ReportLog(folder / "own.spool", spool_bytes, self.counts)
        self.sender = Sender(transport, log, QUICK, held=lambda: self.held, clock=lambda: 0.0)
        self.send(RunCreate(run_id="run"))
        for first in range(0, reports, 4):
            self.send(ReportBatch(reports=batch_of(first, 4)))
        self.held = False

    def report(self, seq):
        self.counts.add()
        self.send(ReportBatch(reports=batch_of(seq, 1)))

    def send(self, body):
        self.sender.take(Envelope("project", "run", "stream", body))

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
DELETED = NotFound("deleted", status=410)
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
    stream = Stream(tmp_path, transport, 8, spooled=spooled)
    if spooled:
        stream.sender.drain()
    assert (stream.sender.last_error, stream.sender.pause_seconds > 0) == (error, True)
    assert stream.arrived == list(range(sent))
    assert stream.places == {"pending": 0, "spooled": 8 - sent, "sent": sent}
    assert stream.sender.drain(now=True)
    assert stream.arrived == list(range(8))
    assert stream.places == {"pending": 0, "spooled": 0, "sent": 8}
    assert (stream.sender.last_error, stream.sender.log.is_empty) == (None, True)


@pytest.mark.parametrize("later", [False, True])
def test_gaps_of_a_batch_that_is_sent_in_halves_arrive_once(tmp_path, later):
    gap = ReportGap(first_seq=0, last_seq=3, reason="queue_full")
    transport = Scripted(None, TOO_LONG, *[Unavailable("busy", status=503)] * later)
    stream = Stream(tmp_path, transport, 0, spooled=False)
    stream.counts.add(4)
    stream.send(ReportBatch(reports=batch_of(4, 4), gaps=[gap]))
    assert stream.sender.drain(now=True) == later
    assert stream.arrived == [4, 5, 6, 7]
    assert gaps_of(transport) == [gap]


@pytest.mark.parametrize("error", LATER, ids=str)
@pytest.mark.parametrize("registered", [False, True], ids=["while registering again", "at the repeat"])
def test_a_server_that_lost_the_stream_and_is_busy_is_told_later(tmp_path, error, registered):
    transport = Scripted(None, LOST, *[None] * registered, error)
    stream = Stream(tmp_path, transport, 8, spooled=False)
    assert (stream.sender.last_error, stream.sender.pause_seconds > 0) == (error, True)
    assert stream.places == {"pending": 0, "spooled": 8, "sent": 0}
    assert stream.sender.drain(now=True)
    assert stream.arrived == list(range(8))
    assert stream.places == {"pending": 0, "spooled": 0, "sent": 8}


@pytest.mark.parametrize(
    ("script", "arrive", "dropped"),
    [
        ([LOST, LOST], range(4, 8), {"refused_404": 4}),
        ([LOST, None, LOST], range(4, 8), {"refused_404": 4}),
        ([TOO_LONG, DELETED], [], {"run_deleted": 8}),
        ([LOST, None, TOO_LONG], range(8), {}),
    ],
    ids=["the run is not taken again", "nor its reports", "deleted, half-way", "in halves, once told again"],
)
def test_what_a_server_does_not_take_in_the_end_is_dropped_and_told(tmp_path, script, arrive, dropped):
    stream = Stream(tmp_path, Scripted(None, *script), 8, spooled=False)
    assert stream.arrived == list(arrive)
    assert stream.places == {"pending": 0, "spooled": 0, "sent": len(arrive), **dropped}
    gaps = [ReportGap(first_seq=0, last_seq=3, reason=reason) for reason in dropped if arrive]
    assert gaps_of(stream.transport) == gaps
