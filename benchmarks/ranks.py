"""One job of many ranks against one server as users run it, on SQLite and on PostgreSQL.

Every `--interval` seconds (10) each of `--ranks` (1,000) sends a report of 200 layers × 60 statistics and 34
histogram bins, over 8 connections, `--points` times (10). Behind each point the dashboard's questions are asked,
while the server seals. Held: every report is there once, and every point is seen with all ranks. Times are the
machine's, and only stated.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._population import LARGE, register, requests
from benchmarks._serving import Connection, check, cpu_seconds, run_cluster, serving
from collage_monitor import wire

__all__ = ["Job", "Outcome", "run_job"]

RUN: Final = "job"
CONNECTIONS: Final = 8
MIDDLE: Final = LARGE.layers // 2
QUESTIONS: Final = {
    "heatmap": f"/runs/{RUN}/heatmap?metric=edq_ratio",
    "the model's curve": f"/runs/{RUN}/series?metric=edq_ratio",
    "a layer's curve": f"/runs/{RUN}/series?metric=edq_ratio&layer=layer.{MIDDLE}",
    "newest point": f"/runs/{RUN}/latest",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """So many ranks, each with a report every `interval` seconds, `points` times."""

    ranks: int = 1000
    points: int = 10
    interval: float = 10.0


@dataclass
class Outcome:
    """The results in seconds; at the end the server's own counts of streams and points."""

    registered: float = 0.0
    waits: list[float] = field(default_factory=list)
    questions: dict[str, list[float]] = field(default_factory=dict)
    late: float = 0.0
    server_cpu_seconds: float = 0.0
    most_memory: int = 0
    incomplete_streams: int = 0
    incomplete_points: int = 0


class Ranks:
    """The job's senders: each connection serves the same ranks throughout."""

    def __init__(self, job: Job, port: int) -> None:
        self._parts = np.array_split(np.arange(job.ranks), CONNECTIONS)
        self._port = port

    def send(self, point: int) -> Iterator[float]:
        """One report of every rank; seconds until each was acknowledged, refusals and waits included."""
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            for waits in threads.map(partial(self._send, point), self._parts):
                yield from waits

    def _send(self, point: int, ranks: np.ndarray) -> list[float]:
        waits = []
        with Connection(self._port) as connection:
            for rank in ranks:
                [request] = requests(f"{RUN}-{rank}", LARGE, point, 1, 1)
                began = time.perf_counter()
                while (answer := connection.exchange(request))[0] == 503:
                    time.sleep(1.0)
                waits.append(time.perf_counter() - began)
                check(*answer, reports=1)
        return waits


def run_job(job: Job, folder: Path, postgres: int | None = None, **settings: object) -> Outcome:
    """A fresh server, all ranks registered, all reports sent and everything asked back.

    `postgres` is the process id of its cluster, whose CPU is counted with the server's.
    """
    outcome = Outcome()
    with serving(folder, **settings) as (process_id, port):
        processes = [process_id] if postgres is None else [process_id, postgres]
        began = time.perf_counter()
        register(port, RUN, LARGE, job.ranks)
        outcome.registered = time.perf_counter() - began
        ranks = Ranks(job, port)
        before, began = sum(map(cpu_seconds, processes)), time.perf_counter()
        for point in range(job.points):
            outcome.waits += ranks.send(point)
            for name, path in QUESTIONS.items():
                outcome.questions.setdefault(name, []).append(_ask(port, path)[0])
            left = began + (point + 1) * job.interval - time.perf_counter()
            outcome.late = max(outcome.late, -left)
            time.sleep(max(left, 0.0))
        outcome.server_cpu_seconds = sum(map(cpu_seconds, processes)) - before
        outcome.most_memory = _most_memory(process_id)
        _verify(job, port, outcome)
    return outcome


def _ask(port: int, path: str) -> tuple[float, bytes | bytearray]:
    """(seconds, body) of an answer."""
    with Connection(port) as connection:
        began = time.perf_counter()
        body = connection.get(path)
        return time.perf_counter() - began, body


def _most_memory(process_id: int) -> int:
    """The largest resident set that the process had, in bytes."""
    status = Path(f"/proc/{process_id}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _verify(job: Job, port: int, outcome: Outcome) -> None:
    streams = msgspec.json.decode(_ask(port, f"/runs/{RUN}/streams")[1], type=wire.StreamList).streams
    complete = sum((stream.reports, stream.missing) == (job.points, 0) for stream in streams)
    outcome.incomplete_streams = job.ranks - complete
    curve = _ask(port, f"/runs/{RUN}/series?metric=edq_ratio&points={10 * job.points}")[1]
    ranks = msgspec.json.decode(curve, type=wire.Series).ranks or []
    outcome.incomplete_points = job.points - ranks.count(job.ranks)


def figures_of(job: Job, kind: str, outcome: Outcome) -> list[Figure]:
    """Gated figures first, then the others."""
    milliseconds = 1e3 * np.array(outcome.waits)

    def one(name: str, unit: str, *values: float, **bound: float) -> Figure:
        return Figure(f"{kind}: {name}", unit, tuple(map(float, values)), **bound)

    return [
        one("ranks whose reports are not all there once", "", outcome.incomplete_streams, limit=0.0),
        one("points that are not seen with all ranks", "", outcome.incomplete_points, limit=0.0),
        one("acknowledgement, p99", "ms", np.percentile(milliseconds, 99)),
        one("acknowledgement, p50", "ms", np.percentile(milliseconds, 50)),
        one("the job was kept waiting", "s", outcome.late),
        one("registering all ranks", "s", outcome.registered),
        *(one(name, "ms", *(1e3 * np.array(times))) for name, times in outcome.questions.items()),
        one("CPU of server and database", "cores", outcome.server_cpu_seconds / (job.points * job.interval)),
        one("memory of the server, most", "MiB", outcome.most_memory / 2**20),
    ]


def command(arguments: list[str]) -> int:
    """The command line: options of the job, then those of every benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks", type=int, default=Job.ranks)
    parser.add_argument("--points", type=int, default=Job.points, help="reports of each rank")
    parser.add_argument("--interval", type=float, default=Job.interval, help="seconds between two of them")
    chosen, others = parser.parse_known_args(arguments)
    job = Job(**vars(chosen))

    def measure(_: Options) -> Measuring:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            yield from figures_of(job, "SQLite", run_job(job, folder))
            cluster = stack.enter_context(run_cluster())
            if cluster is not None:
                url, process_id = cluster
                yield from figures_of(job, "PostgreSQL", run_job(job, folder, process_id, database=url))
        notes = [f"{job.ranks} ranks × {LARGE.numbers} numbers every {job.interval:g} s, {job.points} times"]
        if cluster is None:
            notes.append("no PostgreSQL programs on this machine: only SQLite was measured")
        return notes

    return main("ranks", __doc__ or "", measure, others)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
