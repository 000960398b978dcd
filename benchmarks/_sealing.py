"""What sealing costs: acknowledgements while it goes on, its CPU, and the disk that is taken afterwards."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks._harness import Figure
from benchmarks._reports import SMALL, Shape, register, requests
from benchmarks._serving import Connection, Server

__all__ = ["disk_figures", "sealing_figures"]

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

    def __init__(self, server: Server, run_id: str, rank: int) -> None:
        self.waits: list[float] = []
        self._server = server
        self._stream_id = f"{run_id}-{rank}"
        self._next_seq = 0

    def send(self, stop: threading.Event, least: int) -> None:
        """Post until told to stop, and `least` times at least."""
        self.waits = []
        with Connection(self._server.port) as connection:
            while len(self.waits) < least or not stop.is_set():
                for request in requests(self._stream_id, SMALL, self._next_seq, 50, 1):
                    self._next_seq += 1
                    started = time.perf_counter()
                    status, answer = connection.exchange(request)
                    self.waits.append(time.perf_counter() - started)
                    if status != 200:
                        raise RuntimeError(f"{status}: {answer[:300]!r}")


def _fill(server: Server, run_id: str, shape: Shape, count: int) -> None:
    register(server.port, run_id, shape, 1)
    _post(server, requests(f"{run_id}-0", shape, 0, count, 16))


def _post(server: Server, encoded: list[bytes]) -> None:
    with Connection(server.port) as connection:
        for request in encoded:
            status, answer = connection.exchange(request)
            if status != 200:
                raise RuntimeError(f"{status}: {answer[:300]!r}")


def _round(senders: list[_Sender], server: Server | None) -> list[float]:
    """Seconds of every answer; with a server, as long as it seals."""
    stop = threading.Event()
    least = -(-LEAST // len(senders))
    threads = [threading.Thread(target=sender.send, args=(stop, least)) for sender in senders]
    if server is not None:
        server.start_sealing()
    for thread in threads:
        thread.start()
    if server is not None:
        server.wait_sealed()
    stop.set()
    for thread in threads:
        thread.join()
    return [wait for sender in senders for wait in sender.waits]


def p99(waits: list[float]) -> float:
    """The 99th percentile."""
    return float(np.percentile(waits, 99))


def sealing_figures(server: Server, rounds: int) -> list[Figure]:
    """Acknowledgements at eight connections beside a run that is being sealed, and without."""
    register(server.port, "beside", SMALL, CONNECTIONS)
    senders = [_Sender(server, "beside", rank) for rank in range(CONNECTIONS)]
    _round(senders, None)
    quiet: list[list[float]] = []
    sealing: list[list[float]] = []
    for number in range(rounds):
        _fill(server, f"sealed-{number}", WIDE, BACKLOG)
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


def disk_figures(server: Server, folder: Path) -> list[Figure]:
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
