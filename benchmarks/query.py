"""How long questions take through HTTP, on a store with millions of sealed numbers, SQLite and PostgreSQL in turns.

Two populations: runs of 200 layers × 20 statistics (20 of 2,000 points, one of 10,000), and runs with model totals
only (50 of 10,000 points, one of 100,000). Over one connection, encoding included. Each round asks for another
number of points, so that no curve is kept from the last (what stands beside the curves of a comparison is); "asked
again" is the same question once more, from the answers kept; "CPU" that of server and database together; "cold" the
first answer of a fresh server whose files were dropped from the page cache (a PostgreSQL keeps its own buffers).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from collage_server.store import PostgresqlStore

from benchmarks._harness import Figure, Options, main
from benchmarks._population import LAYERED, MODELS, FillingStore, populate
from benchmarks._postgresql import run_cluster
from benchmarks._serving import Connection, Server, run_server

ROUNDS: Final = 15
GATE_ROUNDS: Final = 9
_TEN: Final = [run for run in LAYERED if run != "layers-long"][:10]
_FIFTY: Final = [run for run in MODELS if run != "model-long"]
_EDQ: Final = "metric=edq_ratio"


@dataclass(frozen=True)
class Question:
    """Paths asked one after the other, so many points of each, and the most that the median of all may take.

    `limits_ms` are those of SQLite and PostgreSQL; None is stated, not held.
    """

    name: str
    paths: list[str]
    points: int
    limits_ms: tuple[float, float] | None


@dataclass
class Side:
    """A database full of runs, and what was measured on it: milliseconds by question."""

    kind: str
    folder: Path
    data: Path
    database: str | None = None
    postgres: int | None = None
    seconds: float = 0.0
    warm: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[str, list[float]] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)


def questions() -> list[Question]:
    """What the dashboard asks."""
    ten, fifty = ("&".join(f"run={run}" for run in runs) for runs in (_TEN, _FIFTY))
    layer = f"{_EDQ}&layer=layer.100"
    return [
        Question("heatmap, 2,000 points × 200 layers", [f"/runs/layers-0/heatmap?{_EDQ}"], 200, (50, 100)),
        Question("heatmap, 10,000 points × 200 layers", [f"/runs/layers-long/heatmap?{_EDQ}"], 200, (50, 100)),
        Question("one layer over 10 runs", [f"/compare?{ten}&{layer}"], 1000, (50, 100)),
        Question("one layer, 10 runs one by one", [f"/runs/{run}/series?{layer}" for run in _TEN], 1000, None),
        Question("50 runs × 10,000 points", [f"/compare?{fifty}&{_EDQ}"], 1000, (60, 200)),
        Question("a curve of 100,000 points", [f"/runs/model-long/series?{_EDQ}"], 1000, (20, 40)),
        Question("a loss of 100,000 points", ["/runs/model-long/series?metric=loss"], 1000, (20, 40)),
    ]


def ask(connection: Connection, question: Question, fewer: int = 0) -> float:
    """Milliseconds from asking to the last byte of the last answer; `fewer` points make it a new question."""
    started = time.perf_counter()
    for path in question.paths:
        target = f"/api/v1{path}&points={question.points - fewer}"
        status, body = connection.exchange(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        if status != 200:
            raise RuntimeError(f"{path}: {status} {body[:300]!r}")
    return 1e3 * (time.perf_counter() - started)


def measure(options: Options) -> tuple[list[str], list[Figure]]:
    """Populate, then ask every question of both databases, warm and cold."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = [_sqlite(root, options.seed)]
        found = stack.enter_context(run_cluster())
        if found is not None:
            sides.append(_postgresql(root, options.seed, *found))
        _warm(sides, rounds)
        for side in sides:
            _cold(side)
    notes = [f"{_numbers() / 1e6:.0f} M numbers on each; {rounds} rounds, databases and questions in turns"]
    notes += [f"{side.kind}: filled in {side.seconds:.0f} s" for side in sides]
    if found is None:
        notes.append("no PostgreSQL programs on this machine: only SQLite was measured")
    return notes, [figure for place, side in enumerate(sides) for figure in _figures(side, place)]


def _sqlite(root: Path, seed: int) -> Side:
    started = time.perf_counter()
    store = FillingStore(root / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    populate(store, seed)
    store.close()
    return Side("SQLite", root, root / "collage.sqlite", seconds=time.perf_counter() - started)


def _postgresql(root: Path, seed: int, url: str, process_id: int) -> Side:
    started = time.perf_counter()
    store = PostgresqlStore(url, stale_after_seconds=600.0)
    store.open()
    populate(store, seed)
    store.close()
    data = Path(url.partition("host=")[2]) / "data"
    return Side("PostgreSQL", root, data, url, process_id, time.perf_counter() - started)


def _numbers() -> int:
    return 20 * (201 * sum(LAYERED.values()) + sum(MODELS.values()))


def _serve(stack: ExitStack, side: Side) -> tuple[Server, Connection]:
    kind = "sqlite" if side.database is None else "postgresql"
    server = stack.enter_context(run_server(kind, side.folder, side.database, side.postgres))
    return server, stack.enter_context(Connection(server.port))


def _warm(sides: Sequence[Side], rounds: int) -> None:
    with ExitStack() as stack:
        served = [(side, *_serve(stack, side)) for side in sides]
        for question in questions():
            for _, _, connection in served:
                ask(connection, question)
        for number in range(1, rounds + 1):
            for question in questions():
                for side, server, connection in served:
                    before = server.cpu_seconds()
                    side.warm.setdefault(question.name, []).append(ask(connection, question, number))
                    side.cpu.setdefault(question.name, []).append(1e3 * (server.cpu_seconds() - before))
                    side.kept.setdefault(question.name, []).append(ask(connection, question, number))


def _cold(side: Side) -> None:
    for question in questions():
        for path in [side.data] if side.data.is_file() else [p for p in side.data.rglob("*") if p.is_file()]:
            _forget(path)
        with ExitStack() as stack:
            side.cold[question.name] = ask(_serve(stack, side)[1], question)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except FileNotFoundError:
        return


def _figures(side: Side, place: int) -> list[Figure]:
    figures = []
    for asked in questions():
        limit = None if asked.limits_ms is None else asked.limits_ms[place]
        figures.append(Figure(f"{side.kind}: {asked.name}", "ms", tuple(side.warm[asked.name]), limit))
    for asked in questions():
        figures.append(Figure(f"{side.kind}: {asked.name}, CPU", "ms", tuple(side.cpu[asked.name])))
        figures.append(Figure(f"{side.kind}: {asked.name}, asked again", "ms", tuple(side.kept[asked.name])))
        figures.append(Figure(f"{side.kind}: {asked.name}, cold", "ms", (side.cold[asked.name],)))
    return figures


if __name__ == "__main__":
    sys.exit(main("query", __doc__ or "", measure))
