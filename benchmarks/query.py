"""How long questions take through HTTP, on a store with millions of sealed numbers.

Two populations: runs of 200 layers × 20 statistics (20 of 2,000 points, one of 10,000), and runs with model totals
only (50 of 10,000 points, one of 100,000). Over one connection, encoding included. Each round asks for another
number of points, so that no answer is kept from the last; "asked again" is the same question once more; "cold" the
first answer of a fresh server whose file was dropped from the page cache.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from collage_server.store import ReportGroup, SqliteStore, Store
from sqlalchemy import Engine, event

from benchmarks._harness import Figure, Options, main
from collage_monitor import wire

LAYERS = 200
STATISTICS = (
    "measured_steps",
    "elements",
    "sampled",
    "active_blocks",
    "nonfinite",
    "idle",
    "stray",
    "lost",
    "distorted",
    "reversed",
    "faithful",
    "lost_visible",
    "unchanged",
    "intended_squared_sum",
    "intended_effective_sum",
    "effective_squared_sum",
    "intended_visible_sum",
    "visible_squared_sum",
    "gradient_squared_sum",
    "parameter_squared_sum",
)
LAYERED = {**{f"layers-{i}": 2_000 for i in range(20)}, "layers-long": 10_000}
MODELS = {**{f"model-{i}": 10_000 for i in range(50)}, "model-long": 100_000}
_LAYER = "series?metric=edq_ratio&layer=layer.100"
POINTS_A_BATCH = 256
ROUNDS, GATE_ROUNDS = 15, 7
NOW = 1.7e9


@dataclass(frozen=True)
class Question:
    """Paths asked one after the other, so many points of each, and the most that the median of all may take."""

    name: str
    paths: list[str]
    points: int
    limit_ms: float


class FillingStore(SqliteStore):
    """SQLite without waiting for the disk: filling is not what is measured."""

    def _connect(self) -> Engine:
        engine = super()._connect()
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF").close())
        return engine


def questions() -> list[Question]:
    """What the dashboard asks."""
    fifty = "&".join(f"run=model-{i}" for i in range(50))
    return [
        Question("heatmap, 2,000 points × 200 layers", ["/runs/layers-0/heatmap?metric=edq_ratio"], 200, 50),
        Question("heatmap, 10,000 points × 200 layers", ["/runs/layers-long/heatmap?metric=edq_ratio"], 200, 50),
        Question("one layer over 10 runs", [f"/runs/layers-{i}/{_LAYER}" for i in range(10)], 1000, 50),
        Question("50 runs × 10,000 points", [f"/compare?{fifty}&metric=edq_ratio"], 1000, 60),
        Question("a curve of 100,000 points", ["/runs/model-long/series?metric=edq_ratio"], 1000, 20),
        Question("a loss of 100,000 points", ["/runs/model-long/series?metric=loss"], 1000, 20),
    ]


def populate(store: Store, runs: dict[str, int], layers: int, seed: int) -> int:
    """Fill and seal; the number of numbers stored."""
    generator = np.random.default_rng(seed)
    names = [wire.Layer(name=f"layer.{i}", shape=[64, 64], dtype="bfloat16", elements=4096) for i in range(layers)]
    blocks = generator.random((64, len(STATISTICS), max(layers, 1)))
    blocks[:, 0] = 1.0
    for run_id, points in runs.items():
        store.create_run("p", wire.RunCreate(run_id=run_id), NOW)
        store.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=0), NOW)
        create = wire.StreamCreate(
            stream_id=run_id, launch_id="l", layers=names, statistics=list(STATISTICS), watch=None
        )
        store.create_stream(run_id, create, NOW)
        stream = store.stream_record(run_id)
        for start in range(0, points, POINTS_A_BATCH):
            numbers = range(start, min(start + POINTS_A_BATCH, points))
            store.append([ReportGroup(stream, [_report(seq, blocks[seq % 64], layers) for seq in numbers])], NOW)
            while store.seal(run_id, NOW):
                pass
    return sum(runs.values()) * len(STATISTICS) * (layers + 1)


def _report(seq: int, block: np.ndarray, layers: int) -> wire.Report:
    model = block.sum(axis=1)
    model[0] = 1.0
    return wire.Report(
        seq=seq,
        step=10 * (seq + 1),
        time=NOW + seq,
        scalars={"loss": 4.0 - seq * 1e-5, "tokens": 1024.0 * seq},
        statistic_count=len(STATISTICS),
        layer_count=layers,
        statistics=wire.block_to_bytes(block) if layers else None,
        model=wire.block_to_bytes(model),
    )


@contextmanager
def served(folder: Path) -> Iterator[http.client.HTTPConnection]:
    """A fresh server on the folder, and one connection to it."""
    command = [sys.executable, "-m", "benchmarks._ingest_server", "sqlite", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if process.stdout is None:
        raise RuntimeError("the server process has no standard output")
    connection = http.client.HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=60)
    try:
        yield connection
    finally:
        connection.close()
        process.terminate()
        process.wait(30)
        process.stdout.close()


def ask(connection: http.client.HTTPConnection, question: Question, fewer: int = 0) -> float:
    """Milliseconds from asking to the last byte of the last answer; `fewer` points make it a new question."""
    started = time.perf_counter()
    for path in question.paths:
        connection.request("GET", f"/api/v1{path}&points={question.points - fewer}")
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {body[:300]!r}")
    return 1e3 * (time.perf_counter() - started)


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(options: Options) -> tuple[list[str], list[Figure]]:
    """Populate, then ask every question warm and cold."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "collage.sqlite"
        store = FillingStore(path, stale_after_seconds=600.0)
        store.open()
        started = time.perf_counter()
        numbers = populate(store, LAYERED, LAYERS, options.seed) + populate(store, MODELS, 0, options.seed)
        filling = time.perf_counter() - started
        store.close()
        size = path.stat().st_size
        asked = questions()
        warm: dict[str, list[float]] = {question.name: [] for question in asked}
        kept: dict[str, list[float]] = {question.name: [] for question in asked}
        with served(folder) as connection:
            for question in asked:
                ask(connection, question)
            for number in range(1, rounds + 1):
                for question in asked:
                    warm[question.name].append(ask(connection, question, number))
                    kept[question.name].append(ask(connection, question, number))
        cold = {} if options.gate else _cold(folder, path, asked)
    notes = [
        f"{numbers / 1e6:.0f} M numbers, filled and sealed in {filling:.0f} s, {size / numbers:.2f} bytes a number",
        f"{rounds} rounds, questions in turns, SQLite, one connection",
    ]
    return notes, _figures(asked, warm, kept, cold)


def _cold(folder: Path, path: Path, asked: Sequence[Question]) -> dict[str, float]:
    found = {}
    for question in asked:
        forget(path)
        with served(folder) as connection:
            found[question.name] = ask(connection, question)
    return found


def _figures(
    asked: Sequence[Question],
    warm: dict[str, list[float]],
    kept: dict[str, list[float]],
    cold: dict[str, float],
) -> list[Figure]:
    figures = [Figure(entry.name, "ms", tuple(warm[entry.name]), entry.limit_ms) for entry in asked]
    figures += [Figure(f"{entry.name}, asked again", "ms", tuple(kept[entry.name])) for entry in asked]
    figures += [Figure(f"{name}, cold", "ms", (value,)) for name, value in cold.items()]
    return figures


if __name__ == "__main__":
    sys.exit(main("query", __doc__ or "", measure))
