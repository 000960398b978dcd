"""What keeping a report durably costs: server CPU and time per report, beside a store that only says yes.

Reports of 500 numbers (50 layers × 10 statistics) over loopback HTTP, msgpack, keep-alive. Both servers run side by
side and take turns, so that they meet the same machine.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks._harness import Figure, Options, main
from collage_monitor import wire

LAYERS, STATISTICS = 50, 10
NUMBERS = LAYERS * STATISTICS
NAMES = (
    "measured_steps",
    "elements",
    "sampled",
    "nonfinite",
    "idle",
    "lost",
    "intended_squared_sum",
    "intended_effective_sum",
    "effective_squared_sum",
    "gradient_squared_sum",
)
ROUNDS, GATE_ROUNDS = 7, 5
REPORTS_A_ROUND = 500
WARM_UP = 100
CPU_LIMIT = 8.0


@dataclass
class Case:
    """One way of sending: connections side by side, reports a request. Values gather over the rounds."""

    name: str
    connections: int
    batch: int
    limit: float | None = None
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {"sqlite": [], "null": []})
    numbers_per_second: dict[str, list[float]] = field(default_factory=lambda: {"sqlite": [], "null": []})
    acknowledgement_seconds: dict[str, list[float]] = field(default_factory=lambda: {"sqlite": [], "null": []})


class Server:
    """A server process, and streams on it whose next report number is known."""

    def __init__(self, kind: str, folder: Path, connections: int) -> None:
        self.kind = kind
        command = [sys.executable, "-m", "benchmarks._ingest_server", kind, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.process.stdout is None:
            raise RuntimeError("the server process has no standard output")
        self.port = int(self.process.stdout.readline())
        self.next_seq = [0] * connections
        self._register(connections)

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def cpu_seconds(self) -> float:
        """CPU of all threads so far, in seconds: nanoseconds on a processor as the scheduler counts them."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def _register(self, connections: int) -> None:
        layers = [
            wire.Layer(name=f"layer.{i}", shape=[64, 64], dtype="bfloat16", elements=4096) for i in range(LAYERS)
        ]
        with connected(self.port) as connection:
            post(connection, "/api/v1/projects/p/runs", wire.encode_message(wire.RunCreate(run_id="r")))
            attempt = wire.AttemptCreate(launch_id="l", first_step=0)
            post(connection, "/api/v1/runs/r/attempts", wire.encode_message(attempt))
            for rank in range(connections):
                stream = wire.StreamCreate(
                    stream_id=f"s{rank}", launch_id="l", rank=rank, layers=layers, statistics=list(NAMES)
                )
                post(connection, "/api/v1/runs/r/streams", wire.encode_message(stream))


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    """A keep-alive connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> bytes:
    """The answer to a POST; anything but success is an error."""
    connection.request("POST", path, body, {"Content-Type": wire.MSGPACK})
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 300:
        raise RuntimeError(f"{path}: {response.status} {answer[:300]!r}")
    return answer


def bodies(first_seq: int, count: int, batch: int, generator: np.random.Generator) -> list[bytes]:
    """Encoded requests of `batch` reports each, `count` reports in all."""
    encoded = []
    for start in range(first_seq, first_seq + count, batch):
        reports = []
        for seq in range(start, start + batch):
            block = generator.random((STATISTICS, LAYERS))
            reports.append(
                wire.Report(
                    seq=seq,
                    step=seq,
                    time=1.7e9 + seq,
                    scalars={"loss": 2.5, "tokens": 1024.0 * seq},
                    statistic_count=STATISTICS,
                    layer_count=LAYERS,
                    statistics=wire.block_to_bytes(block),
                    model=wire.block_to_bytes(block.sum(axis=1)),
                )
            )
        encoded.append(wire.encode_batch(wire.ReportBatch(reports=reports)))
    return encoded


def send(server: Server, rank: int, requests: Sequence[bytes], waits: list[float]) -> None:
    """Post on a stream, one after the other, and note how long each answer took."""
    with connected(server.port) as connection:
        for body in requests:
            started = time.perf_counter()
            answer = post(connection, f"/api/v1/streams/s{rank}/reports", body)
            waits.append(time.perf_counter() - started)
            if json.loads(answer)["rejected"]:
                raise RuntimeError(f"rejected: {answer[:300]!r}")


def measure_round(server: Server, case: Case, count: int, generator: np.random.Generator, *, keep: bool) -> None:
    """One round of a case on a server; `count` reports in all."""
    share = count // case.connections // case.batch * case.batch
    requests = [bodies(server.next_seq[i], share, case.batch, generator) for i in range(case.connections)]
    waits: list[float] = []
    threads = [threading.Thread(target=send, args=(server, i, requests[i], waits)) for i in range(case.connections)]
    cpu, started = server.cpu_seconds(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed, used = time.perf_counter() - started, server.cpu_seconds() - cpu
    for i in range(case.connections):
        server.next_seq[i] += share
    reports = share * case.connections
    if len(waits) * case.batch != reports:
        raise RuntimeError(f"{case.name} on {server.kind}: only {len(waits)} requests were answered")
    if keep:
        case.cpu_seconds[server.kind].append(used / reports)
        case.numbers_per_second[server.kind].append(NUMBERS * reports / elapsed)
        case.acknowledgement_seconds[server.kind].append(statistics.median(waits))


def fdatasync_seconds(folder: Path, count: int = 50) -> float:
    """Median time of making 16 KiB durable on the disk that the stores use."""
    waits = []
    with (folder / "fdatasync").open("wb") as file:
        for _ in range(count):
            file.write(b"x" * 16384)
            file.flush()
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            waits.append(time.perf_counter() - started)
    return statistics.median(waits)


def figures_of(case: Case) -> list[Figure]:
    """A case's figures: the gated ratio first."""
    pairs = list(zip(case.cpu_seconds["sqlite"], case.cpu_seconds["null"], strict=True))
    figures = [
        Figure(f"{case.name}: CPU per report, SQLite / null", "×", tuple(a / b for a, b in pairs), case.limit)
    ]
    for kind in ("sqlite", "null"):
        micro = tuple(1e6 * value for value in case.cpu_seconds[kind])
        figures += [
            Figure(f"{case.name}: {kind}, CPU per report", "µs", micro),
            Figure(f"{case.name}: {kind}, throughput", "numbers/s", tuple(case.numbers_per_second[kind])),
            Figure(
                f"{case.name}: {kind}, acknowledged p50",
                "ms",
                tuple(1e3 * value for value in case.acknowledgement_seconds[kind]),
            ),
        ]
    return figures


def measure(options: Options) -> tuple[list[str], list[Figure]]:
    """Every case on both servers, in turns."""
    cases = [Case("1 connection × 1 report", 1, 1, CPU_LIMIT)]
    if not options.gate:
        cases += [Case("1 connection × 10 reports", 1, 10), Case("8 connections × 1 report", 8, 1)]
    connections = max(case.connections for case in cases)
    generator = np.random.default_rng(options.seed)
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    syncs = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = []
        for kind in ("sqlite", "null"):
            servers.append(Server(kind, Path(folder) / kind, connections))
            stack.callback(servers[-1].stop)
        for case in cases:
            for server in servers:
                measure_round(server, case, WARM_UP * case.connections, generator, keep=False)
            for _ in range(rounds):
                for server in servers:
                    measure_round(server, case, REPORTS_A_ROUND * case.batch, generator, keep=True)
                syncs.append(1e3 * fdatasync_seconds(Path(folder)))
    notes = [
        f"reports of {NUMBERS} numbers ({LAYERS} layers × {STATISTICS} statistics), msgpack, loopback, keep-alive",
        f"{rounds} rounds of {REPORTS_A_ROUND} requests, servers in turns; SQLite: WAL, synchronous=FULL",
    ]
    figures = [figure for case in cases for figure in figures_of(case)]
    return notes, [*figures, Figure("fdatasync of 16 KiB", "ms", tuple(syncs))]


if __name__ == "__main__":
    sys.exit(main("ingest", __doc__ or "", measure))
