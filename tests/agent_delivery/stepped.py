"""A training process whose worker goes on only when told, and what it meets: a clock, a disk and a server of tests.

The server fails as it is told, and asserts of each message what must hold of it.
"""

import errno
import os
import threading
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, NoReturn

from collage_agent.transport import pipeline as pipelines
from collage_agent.transport import report_log
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.queue import BoundedQueue
from collage_agent.transport.sender import Sender

from collage_monitor.errors import NotAuthorised, NotFound, ServerRefusal, ServerUnreachable, Unavailable
from collage_monitor.wire import BatchAnswer, RejectedReport, Report, ReportBatch
from tests.agent_delivery.doubles import QUICK, HandleDouble, make_run, measurement
from tests.waiting import PATIENCE_SECONDS

__all__ = ["TROUBLES", "Clock", "Disk", "Process", "UnreliableServer", "patch_surroundings"]

LONG_SECONDS = 60.0
_BEFORE = {
    "cut before": ServerUnreachable("connection lost"),
    "busy": Unavailable("busy", status=503),
    "busy for long": Unavailable("too many requests", status=429, retry_after_seconds=LONG_SECONDS),
    "unknown token": NotAuthorised("not now", status=401),
    "forbidden": NotAuthorised("not now", status=403),
}
_REFUSALS = {f"refuse {status}": ServerRefusal("no", status=status) for status in (400, 409, 422)}
_AFTER = ("cut after", "die after")
TROUBLES = (*_BEFORE, *_REFUSALS, *_AFTER, "die before", "forget", "reject", "slow", "none")


class Deaths:
    """The threads that have ended as a killed process would: nothing catches it, and nobody is told."""

    threads: ClassVar[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()

    @classmethod
    def die(cls) -> NoReturn:
        cls.threads.add(threading.current_thread())
        raise SystemExit


class UnreliableServer:
    """Each message takes one of the `troubles`, in their order; with none left the server is well.

    It holds a stream's reports by seq. A first arrival is newer than all before it, a repeat is the same report,
    and no numbered gap is also a report that the server has acknowledged, unless it refused that itself.
    """

    def __init__(self, clock):
        self.troubles: list[str] = []
        self.most_reports: int | None = None
        self.deleted = False
        self.not_before: dict[str, float] = {}
        """When a stream may send again."""
        self.is_hurried = False
        self.broken: list[str] = []
        self.accepted: defaultdict[str, dict[int, Report]] = defaultdict(dict)
        self.acknowledged: defaultdict[str, set[int]] = defaultdict(set)
        self.repeated: set[tuple[str, int]] = set()
        """Reports whose answer was lost, or that came again."""
        self.refused: set[tuple[str, int]] = set()
        self.gaps: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self.newest_batch: Counter[str] = Counter()
        """The first report of each stream's newest batch: every gap before it has been told."""
        self.launches: list[str] = []
        self.may_lack_registrations = False
        self._clock = clock
        self._known: set[tuple[str, str]] = set()
        self._places: dict[str, tuple[str, int]] = {}

    def send(self, envelope, wait):
        """Answer a message. What it breaks is kept in `broken`: a worker would take the error for trouble."""
        try:
            return self._send(envelope)
        except AssertionError as error:
            self.broken.append(str(error))
            Deaths.die()

    def _send(self, envelope):
        trouble = self.troubles.pop(0) if self.troubles else "none"
        arrived = Envelope.from_bytes(envelope.to_bytes())
        early = self._clock.now < self.not_before.get(arrived.stream_id, 0.0)
        assert self.is_hurried or not early, "it was asked to wait"
        if trouble == "busy for long":
            self.not_before[arrived.stream_id] = self._clock.now + LONG_SECONDS
        if trouble in _BEFORE:
            raise _BEFORE[trouble]
        if trouble == "die before":
            Deaths.die()
        if trouble == "slow":
            self._clock.sleep(4.0)
        if trouble == "forget":
            self._known.clear()
            self.may_lack_registrations = True
        self._refuse(arrived, trouble)
        answer = self._take(arrived, reject=trouble == "reject")
        if trouble in _AFTER:
            self.repeated |= _numbers(arrived)
            if trouble == "die after":
                Deaths.die()
            raise ServerUnreachable("the answer was lost")
        refused = {entry.seq for entry in answer.rejected}
        self.acknowledged[arrived.stream_id] |= {seq for _, seq in _numbers(arrived)} - refused
        return answer

    @contextmanager
    def hurried(self):
        """A run that ends need not wait, nor does the next process, which has not heard that it should."""
        self.is_hurried = True
        yield
        self.is_hurried = False
        self.not_before.clear()

    def close(self):
        """Nothing to let go of."""

    def _refuse(self, envelope, trouble):
        """Raise what the server answers instead of taking the message."""
        body = envelope.body
        if self.deleted:
            self.refused |= _numbers(envelope)
            raise NotFound("deleted", status=410)
        if trouble in _REFUSALS and envelope.kind not in {"run", "reports"}:
            self.may_lack_registrations = True
            raise _REFUSALS[trouble]
        needed = {"attempt": [("run", envelope.run_id)], "update": [("run", envelope.run_id)]}
        if envelope.kind == "stream":
            needed["stream"] = [("attempt", body.launch_id)]
        needed["reports"] = [("stream", envelope.stream_id)]
        if not self._known.issuperset(needed.get(envelope.kind, [])):
            assert self.may_lack_registrations, f"{envelope.kind} came before what introduces it"
            self.refused |= _numbers(envelope)
            raise NotFound("no such stream", status=404)
        if envelope.kind == "reports":
            if self.most_reports is not None and len(body.reports) > self.most_reports:
                raise ServerRefusal("too long", status=413)
            if trouble in _REFUSALS:
                self.refused |= _numbers(envelope)
                raise _REFUSALS[trouble]

    def _take(self, envelope, *, reject):
        body, stream = envelope.body, envelope.stream_id
        if not isinstance(body, ReportBatch):
            name = {"run": envelope.run_id, "attempt": getattr(body, "launch_id", ""), "stream": stream}
            self._known.add((envelope.kind, name.get(envelope.kind, "")))
            if envelope.kind == "attempt" and body.launch_id not in self.launches:
                self.launches.append(body.launch_id)
            return BatchAnswer(accepted=0, duplicates=0)
        for gap in body.gaps:
            for seq in range(gap.first_seq, gap.last_seq + 1):
                self._number(stream, seq, gap.reason)
        self.newest_batch[stream] = max([self.newest_batch[stream], *(report.seq for report in body.reports[:1])])
        rejected = [
            RejectedReport(index=index, seq=report.seq, code="odd", message="not this one")
            for index, report in enumerate(body.reports)
            if reject and index % 2 == 0
        ]
        self.refused |= {(stream, entry.seq) for entry in rejected if entry.seq is not None}
        refused = {entry.seq for entry in rejected}
        kept = [report for report in body.reports if report.seq not in refused]
        fresh = [report for report in kept if self._accept(stream, report)]
        return BatchAnswer(accepted=len(fresh), duplicates=len(kept) - len(fresh), rejected=rejected)

    def _accept(self, stream, report):
        """Keep a report; False where it is known."""
        known = self.accepted[stream]
        if report.seq in known:
            assert known[report.seq] == report, f"report {report.seq} came again and was another one"
            self.repeated.add((stream, report.seq))
            return False
        assert report.seq > max(known, default=-1) or (stream, report.seq) in self.refused, (
            f"report {report.seq} came after {max(known)}"
        )
        reason = self.gaps[stream].get(report.seq)
        assert reason is None or (stream, report.seq) in self.refused, f"report {report.seq} was given up: {reason}"
        known[report.seq] = report
        for name in report.scalars.keys() - {"reports_dropped"}:
            place = self._places.setdefault(name, (stream, report.seq))
            assert place == (stream, report.seq), f"{name} is in two reports"
        return True

    def _number(self, stream, seq, reason):
        self.gaps[stream].setdefault(seq, reason)
        excused = self.repeated | self.refused
        assert seq not in self.accepted[stream] or (stream, seq) in excused, f"report {seq} is no gap ({reason})"


def _numbers(envelope):
    if not isinstance(envelope.body, ReportBatch):
        return set()
    return {(envelope.stream_id, report.seq) for report in envelope.body.reports}


LIMITS = replace(
    QUICK,
    queue_steps=8,
    batch_reports=3,
    spool_bytes=8_000,
    step_seconds=1e6,
    first_pause_seconds=1.0,
    longest_pause_seconds=4.0,
)
"""Small, so that few steps fill the queue and the spool."""
RUN_ID = "run"


class Clock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self):
        self.now = 1_000.0

    def monotonic(self):
        return self.now

    time = thread_time = monotonic

    def sleep(self, seconds):
        self.now += seconds


class Disk:
    """Each write of a spool takes one of the `troubles`: it is full, or the process dies when half is written."""

    def __init__(self):
        self.troubles: list[str] = []
        self._write = report_log._write_all

    def write(self, descriptor, data, offset):
        trouble = self.troubles.pop(0) if self.troubles else "none"
        if trouble == "dies":
            os.pwrite(descriptor, memoryview(data)[: len(data) // 2], offset)
            Deaths.die()
        if trouble == "full":
            raise OSError(errno.ENOSPC, "no space left on device")
        self._write(descriptor, data, offset)


class SteppedQueue(BoundedQueue):
    """The worker waits here for its next turn."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.turn = threading.Semaphore(0)
        self.killed = False
        self.idle = threading.Event()

    def wait_for_steps(self, linger_seconds, longest_seconds):
        self.idle.set()
        self.turn.acquire()
        if self.killed:
            Deaths.die()

    def wake(self):
        super().wake()
        self.turn.release()


class SteadyRandom:
    """Pauses without jitter: an example that fails must fail again."""

    def Random(self):  # noqa: N802
        return self

    def uniform(self, low, high):
        return high


def patch_surroundings(patch, clock, disk, server):
    """Let whatever delivers meet the test's clock, disk and server."""
    patch.setattr(threading, "excepthook", threading.__excepthook__)
    patch.setattr(pipelines, "time", clock)
    patch.setattr(pipelines, "BoundedQueue", SteppedQueue)
    patch.setattr(pipelines, "HttpTransport", lambda *arguments, **options: server)
    patch.setattr(report_log, "_write_all", disk.write)
    patch.setattr("collage_monitor.backoff.random", SteadyRandom())
    patch.setitem(Sender.__init__.__kwdefaults__, "clock", clock.monotonic)


class Process:
    """One run of one process, and what its training has told it.

    `entries` are the steps that it told, `surplus` the reports that a step may take beyond its first.
    """

    def __init__(self, folder, *, offline):
        self.offline = offline
        self.handle = HandleDouble(0)
        self.entries = self.surplus = self._measured = 0
        self.step = 1
        self.started = False
        self.items = {}
        """The step of each item, by the name of its scalar."""
        self._open: int | None = None
        self.run = make_run(
            folder,
            limits=LIMITS,
            run_id=RUN_ID,
            mode="offline" if offline else "online",
            server_url="http://127.0.0.1:1",
        )
        self.pipeline = self.run._pipeline
        self.queue = self.pipeline.queue
        self.index = self.run.attach(self.handle)
        self.streams = [self.run._identity.stream_id]
        self.launches = [self.run._identity.launch_id]
        self._wait()

    @property
    def is_alive(self):
        return self.pipeline._thread.is_alive()

    @property
    def has_died(self):
        """Whether it has ended before its end."""
        return self.pipeline._thread in Deaths.threads

    @property
    def dropped(self):
        return sum(self.run.reports_dropped.values())

    def log(self, name, step):
        self._told(name, step)
        self.run.log({name: 1.0}, step=step)

    def measure(self, name, step):
        if not self.started:
            self.begin(step)
        self._told(name, step)
        self._measured += 1
        self.surplus += self._measured > 1
        self.run.measured(replace(measurement(step), scalars={name: 1.0}))
        self.handle.step = max(step, self.handle.step)

    def begin(self, step):
        """The watched optimizer's first step, or a step that it has already done: training went back."""
        if self.started:
            earlier, self.handle = self.handle, HandleDouble(0)
            self.index = self.run.attach(self.handle, earlier=earlier)
        self.run.started(step, self.index)
        identity = self.run._identity
        if not self.started or identity.stream_id != self.streams[-1]:
            self._open = None
        self.started = True
        if identity.stream_id not in self.streams:
            self.streams.append(identity.stream_id)
            self.launches.append(identity.launch_id)

    def work(self):
        """One turn of the worker."""
        self.queue.idle.clear()
        self.queue.turn.release()
        self._wait()

    def finish(self, state):
        """End the run; a worker that dies meanwhile has not ended it."""
        self.run.finish(state)
        self.pipeline._thread.join(PATIENCE_SECONDS)
        self._let_go()

    def kill(self):
        """End at once, wherever the worker is."""
        self.queue.killed = True
        self.queue.turn.release()
        self.pipeline._thread.join(PATIENCE_SECONDS)
        self._let_go()

    def _told(self, name, step):
        self.items[name] = step
        if step != self._open:
            self.entries += 1
            self._open, self._measured = step, 0

    def _wait(self):
        while self.is_alive and not self.queue.idle.wait(0.01):
            pass

    def _let_go(self):
        """A dead process holds no file."""
        self.pipeline.forget()
