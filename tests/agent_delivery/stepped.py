"""A training process whose worker goes on only when it is told, on a clock and a disk of the test's."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace

from collage_agent.transport import pipeline as pipelines
from collage_agent.transport import report_log
from collage_agent.transport.queue import BoundedQueue
from collage_agent.transport.sender import Sender

from tests.agent_delivery.doubles import QUICK, HandleDouble, make_run, measurement
from tests.agent_delivery.unreliable import Deaths
from tests.waiting import PATIENCE_SECONDS

__all__ = ["Clock", "Disk", "Process", "patch_surroundings"]

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
