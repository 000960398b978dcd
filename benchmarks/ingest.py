"""What keeping reports durably costs: server CPU and time, beside a server that only says yes.

That one ("null") is compared with one Starlette route that reads the same bodies, decodes them and looks at each
byte once ("bare"): no rate is held to a number, so every gate holds on any machine.

Reports of 500 numbers (50 layers × 10 statistics) over loopback HTTP, msgpack, keep-alive, encoded beforehand. The
servers of a case stand side by side and take turns, so that they meet the same machine; nothing is sealed
meanwhile, sealing has figures of its own. `--gate` leaves out the reports of 200 layers and the peers.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._peers import peer_figures
from benchmarks._population import LARGE, SMALL, Shape, register, requests
from benchmarks._serving import Connection, ServerProcess, run_cluster, run_server

__all__ = ["Case", "Round"]

ROUNDS, GATE_ROUNDS = 9, 5
WARM_UP_REQUESTS = 200
SYNC_BYTES = 16384
SLICES = 4
"""A round is sent in so many, with fdatasync measured between them: it changes from one second to the next."""


@dataclass(frozen=True)
class Case:
    """One way of sending: connections side by side, reports a request, requests a round; and who takes turns."""

    name: str
    shape: Shape
    connections: int
    batch: int
    requests: int
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """One round on one server; `sync_seconds` is the median fdatasync in between."""

    cpu_seconds: float
    numbers_per_second: float
    p50_seconds: float
    sync_seconds: float


Rounds = dict[str, list[Round]]
_KINDS: Final = ("sqlite", "null", "bare", "postgresql")
ONE: Final = Case("1 connection × 1 report", SMALL, 1, 1, 3000, _KINDS)
TEN: Final = Case("1 connection × 10 reports", SMALL, 1, 10, 400, _KINDS)
EIGHT: Final = Case("8 connections × 1 report", SMALL, 8, 1, 1600, ("sqlite", "single", "null", "postgresql"))
LARGE_ONE: Final = Case("1 connection × 1 large report", LARGE, 1, 1, 150, _KINDS)
LARGE_EIGHT: Final = Case("8 connections × 1 large report", LARGE, 8, 1, 240, _KINDS)


class Target:
    """A server, and for one case the streams on it whose next report number is known."""

    def __init__(self, server: ServerProcess, case: Case) -> None:
        self.server = server
        self.case = case
        self.next_seq = 0
        self.run_id = case.name.replace(" ", "-").replace("×", "x")
        register(server.port, self.run_id, case.shape, case.connections)

    def send(self, count: int) -> tuple[list[float], float]:
        """So many requests over all connections; seconds that each answer took, and all of them together."""
        case, share = self.case, count // self.case.connections
        encoded = [
            requests(f"{self.run_id}-{i}", case.shape, self.next_seq, share * case.batch, case.batch)
            for i in range(case.connections)
        ]
        self.next_seq += share * case.batch
        started = time.perf_counter()
        with ThreadPoolExecutor(case.connections) as threads:
            waits = list(threads.map(self._post, encoded))
        return list(chain.from_iterable(waits)), time.perf_counter() - started

    def _post(self, encoded: Sequence[bytes]) -> list[float]:
        with Connection(self.server.port) as connection:
            return connection.send(encoded, self.case.batch)


def measure_round(target: Target, folder: Path) -> Round:
    """One round of a case on one server, which has sealed what earlier rounds left.

    A long journal would be read again whenever the server evaluates the run in the background.
    """
    if target.server.kind != "bare":
        target.server.start_sealing()
        target.server.wait_sealed()
    case, began = target.case, target.server.cpu_seconds()
    waits: list[float] = []
    syncs: list[float] = []
    elapsed = 0.0
    for _ in range(SLICES):
        syncs += sync_waits(folder, 15)
        answered, took = target.send(case.requests // SLICES)
        waits += answered
        elapsed += took
    used = target.server.cpu_seconds() - began
    reports = len(waits) * case.batch
    return Round(
        cpu_seconds=used / reports,
        numbers_per_second=case.shape.numbers * reports / elapsed,
        p50_seconds=statistics.median(waits),
        sync_seconds=statistics.median(syncs),
    )


def sync_waits(folder: Path, count: int) -> list[float]:
    """Seconds that making 16 KiB durable takes, each time, on the disk that the stores use.

    The file has its length already, as a write-ahead log mostly has: a file that grows would also wait for the file
    system's own journal.
    """
    waits = []
    with (folder / "fdatasync").open("w+b", buffering=0) as file:
        file.write(bytes(count * SYNC_BYTES))
        os.fsync(file.fileno())
        for number in range(count):
            os.pwrite(file.fileno(), b"x" * SYNC_BYTES, number * SYNC_BYTES)
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            waits.append(time.perf_counter() - started)
    return waits


def measure_case(case: Case, servers: dict[str, ServerProcess], folder: Path, rounds: int) -> Rounds:
    """All rounds of a case, servers in turns; servers that are not there are left out."""
    targets = {kind: Target(servers[kind], case) for kind in case.kinds if kind in servers}
    for target in targets.values():
        target.send(min(WARM_UP_REQUESTS, case.requests))
    found: Rounds = {kind: [] for kind in targets}
    for _ in range(rounds):
        for kind, target in targets.items():
            found[kind].append(measure_round(target, folder))
    return found


def ratio(
    rounds: Rounds, kinds: tuple[str, str], of: Callable[[Round], float], name: str, **bound: float
) -> list[Figure]:
    """The first server's value over the second's, round by round; nothing where one of them is not there."""
    if any(kind not in rounds for kind in kinds):
        return []
    pairs = zip(rounds[kinds[0]], rounds[kinds[1]], strict=True)
    return [Figure(name, "×", tuple(of(a) / of(b) for a, b in pairs), **bound)]


def cpu(entry: Round) -> float:
    """CPU of the server a report, seconds."""
    return entry.cpu_seconds


def rate(entry: Round) -> float:
    """Numbers a second."""
    return entry.numbers_per_second


def ratios_of_one(rounds: Rounds) -> list[Figure]:
    """Gated ratios at one connection and one report a request."""
    waiting = tuple(
        (ours.p50_seconds - ours.sync_seconds) / null.p50_seconds
        for ours, null in zip(rounds["sqlite"], rounds["null"], strict=True)
    )
    return [
        *ratio(rounds, ("sqlite", "null"), cpu, f"{ONE.name}: CPU per report, SQLite / null", limit=4.0),
        Figure(f"{ONE.name}: (SQLite p50 − fdatasync) / null p50", "×", waiting, limit=3.0),
        *ratio(rounds, ("null", "bare"), cpu, f"{ONE.name}: CPU per report, null / bare route", limit=3.0),
        *ratio(rounds, ("postgresql", "sqlite"), rate, f"{ONE.name}: rate, PostgreSQL / SQLite", floor=0.6),
    ]


def ratios_of_ten(rounds: Rounds) -> list[Figure]:
    """Gated ratios at ten reports a request."""
    return [
        *ratio(rounds, ("sqlite", "null"), cpu, f"{TEN.name}: CPU per report, SQLite / null", limit=5.0),
        *ratio(rounds, ("null", "bare"), cpu, f"{TEN.name}: CPU per report, null / bare route", limit=3.5),
        *ratio(rounds, ("postgresql", "sqlite"), rate, f"{TEN.name}: rate, PostgreSQL / SQLite", floor=0.6),
    ]


def ratios_of_eight(rounds: Rounds) -> list[Figure]:
    """Gated ratios at eight connections."""
    return [
        *ratio(rounds, ("sqlite", "single"), rate, f"{EIGHT.name}: group commit / one a request", floor=1.4),
        *ratio(rounds, ("postgresql", "sqlite"), rate, f"{EIGHT.name}: rate, PostgreSQL / SQLite", floor=0.6),
    ]


def plain_figures(case: Case, rounds: Rounds) -> list[Figure]:
    """A case's own values, server by server."""
    figures = []
    for kind, entries in rounds.items():
        figures += [
            Figure(
                f"{case.name}: {kind}, CPU per report", "µs", tuple(1e6 * entry.cpu_seconds for entry in entries)
            ),
            Figure(f"{case.name}: {kind}, rate", "M numbers/s", tuple(rate(entry) / 1e6 for entry in entries)),
            Figure(f"{case.name}: {kind}, p50", "ms", tuple(1e3 * entry.p50_seconds for entry in entries)),
        ]
    syncs = tuple(1e3 * entry.sync_seconds for entries in rounds.values() for entry in entries)
    return [*figures, Figure(f"{case.name}: fdatasync of 16 KiB beside it", "ms", syncs)]


def measure(options: Options) -> Measuring:
    """Every case on its servers, in turns."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    held = [(ONE, ratios_of_one), (TEN, ratios_of_ten), (EIGHT, ratios_of_eight)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        servers = {
            kind: stack.enter_context(run_server(kind, folder / kind))
            for kind in ("sqlite", "null", "bare", "single")
        }
        cluster = stack.enter_context(run_cluster())
        if cluster is not None:
            entered = run_server("postgresql", folder / "postgresql", *cluster)
            servers["postgresql"] = stack.enter_context(entered)
        for case, ratios in held:
            found = measure_case(case, servers, folder, rounds)
            yield from (*ratios(found), *plain_figures(case, found))
        yield from sealing_figures(servers["sqlite"], rounds)
        with run_server("sqlite", folder / "disk") as server:
            yield from disk_figures(server, folder / "disk")
        for case in () if options.gate else (LARGE_ONE, LARGE_EIGHT):
            yield from plain_figures(case, measure_case(case, servers, folder, rounds))
        peers, beside = ([], []) if options.gate else peer_figures(folder, rounds)
        yield from beside
    notes = [
        f"small reports: {SMALL.numbers} numbers ({SMALL.layers} layers × {len(SMALL.statistics)} statistics); "
        f"large: {LARGE.numbers} (200 layers × 60 statistics and 34 histogram bins); msgpack, loopback, keep-alive",
        f"{rounds} rounds, servers in turns; SQLite: WAL, synchronous=FULL; PostgreSQL: durable, its CPU counted",
        *peers,
    ]
    return notes


BACKLOG: Final = 512
"""Reports of a run that wait to be sealed while others are sent."""
WIDE: Final = Shape("wide", 200, SMALL.statistics)
LEAST: Final = 300
"""Answers of a round at least: p99 of fewer says nothing."""
DISK_REPORTS: Final = 32_768
DISK_SLICE: Final = 8_192
"""Reports between two sealings: what a server under full load takes in while it pauses."""
CONNECTIONS: Final = 8


class _Sender:
    """One connection that posts on one stream until told to stop."""

    def __init__(self, server: ServerProcess, run_id: str, rank: int) -> None:
        self._server = server
        self._stream_id = f"{run_id}-{rank}"
        self._next_seq = 0

    def send(self, stop: threading.Event, least: int) -> list[float]:
        """Post until told to stop, and `least` times at least; seconds of every answer."""
        waits: list[float] = []
        with Connection(self._server.port) as connection:
            while len(waits) < least or not stop.is_set():
                waits += connection.send(requests(self._stream_id, SMALL, self._next_seq, 50, 1))
                self._next_seq += 50
        return waits


def _post(server: ServerProcess, encoded: list[bytes]) -> None:
    with Connection(server.port) as connection:
        connection.send(encoded)


def _round(senders: list[_Sender], server: ServerProcess | None) -> list[float]:
    """Seconds of every answer; with a server, as long as it seals."""
    stop = threading.Event()
    least = -(-LEAST // len(senders))
    if server is not None:
        server.start_sealing()
    with ThreadPoolExecutor(len(senders)) as threads:
        sent = [threads.submit(sender.send, stop, least) for sender in senders]
        if server is not None:
            server.wait_sealed()
        stop.set()
    return [wait for sender in sent for wait in sender.result()]


def p99(waits: list[float]) -> float:
    """The 99th percentile."""
    return float(np.percentile(waits, 99))


def sealing_figures(server: ServerProcess, rounds: int) -> list[Figure]:
    """Acknowledgements at eight connections beside a run that is being sealed, and without."""
    register(server.port, "beside", SMALL, CONNECTIONS)
    senders = [_Sender(server, "beside", rank) for rank in range(CONNECTIONS)]
    _round(senders, None)
    quiet: list[list[float]] = []
    sealing: list[list[float]] = []
    for number in range(rounds):
        register(server.port, f"sealed-{number}", WIDE, 1)
        _post(server, requests(f"sealed-{number}-0", WIDE, 0, BACKLOG, 16))
        quiet.append(_round(senders, None))
        sealing.append(_round(senders, server))
    ratios = tuple(p99(a) / p99(b) for a, b in zip(sealing, quiet, strict=True))
    name = f"{CONNECTIONS} connections × 1 report"
    figures = [Figure(f"{name}: p99 while sealing / without", "×", ratios, limit=4.0)]
    for what, kept in (("while sealing", sealing), ("without", quiet)):
        figures += [
            Figure(f"{name}: p50 {what}", "ms", tuple(1e3 * statistics.median(waits) for waits in kept)),
            Figure(f"{name}: p99 {what}", "ms", tuple(1e3 * p99(waits) for waits in kept)),
        ]
    return figures


def disk_figures(server: ServerProcess, folder: Path) -> list[Figure]:
    """Send, seal, and look at what the folder takes: database, write-ahead log, dead space."""
    before = _bytes_of(folder)
    register(server.port, "disk", SMALL, 1)
    cpu = 0.0
    for start in range(0, DISK_REPORTS, DISK_SLICE):
        _post(server, requests("disk-0", SMALL, start, DISK_SLICE, 16))
        server.start_sealing()
        cpu += server.wait_sealed()
    numbers = DISK_REPORTS * SMALL.numbers
    return [
        Figure("disk after sealing", "bytes a number", ((_bytes_of(folder) - before) / numbers,), limit=12.0),
        Figure("sealing: CPU per report", "µs", (1e6 * cpu / DISK_REPORTS,)),
    ]


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


if __name__ == "__main__":
    sys.exit(main("ingest", __doc__ or "", measure))
