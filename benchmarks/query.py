"""How long questions take through HTTP, on a store with millions of sealed numbers, SQLite and PostgreSQL in turns.

Two populations: runs of 200 layers × 20 statistics (10 of 2,000 points, one of 10,000), and runs with model totals
only (50 of 10,000 points, one of 100,000). Over one connection, encoding included. Each round asks for another
number of points, so that no curve is cached from the last (the values beside the curves of a comparison are).

The gate is a ratio, not a time. Its reference is measured just before, and is what no server could leave out: the
blobs that the question is about, read by key on a connection of its own and summed in one pass of numpy, and the
question's answer encoded once as JSON. Warm answers are compared by the CPU of server and database, which does
not depend on what else the machine does; cold ones by the time that passes. Cold is the first answer of a fresh
server whose files were dropped from the page cache (a PostgreSQL keeps its own buffers); its reference is as cold.
"Asked again" is the same question once more, from the answers kept.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import psycopg
from collage_server.store import PostgresqlStore, Store
from collage_server.store.chunks.blobs import unpack_numbers
from sqlalchemy import text

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._population import EDQ, FAMILIES, UnsyncedStore, numbers_in, populate
from benchmarks._serving import Connection, ServerProcess, cpu_seconds, run_cluster, run_server

ROUNDS, GATE_ROUNDS = 15, 9
COLD_ROUNDS, GATE_COLD_ROUNDS = 5, 3
_TEN: Final = [f"layers-{i}" for i in range(10)]
_FIFTY: Final = [f"model-{i}" for i in range(50)]
_POINTS: Final = "points={points}"
_EDQ: Final = f"metric=edq_ratio&{_POINTS}"
_INTERVAL: Final = (
    *EDQ,
    "active_blocks",
    "variance_numerator/edq_ratio",
    "variance_denominator/edq_ratio",
    "covariance/edq_ratio",
)
_LAYER: Final = 100
_COUNT: Final = (
    "SELECT run.state, run_summary.health, count(*) FROM run LEFT JOIN run_summary "
    "ON run_summary.run_id = run.run_id GROUP BY run.state, run_summary.health"
)


_ROWS: Final = {
    "point_chunk": "5",
    "model_chunk": "(length(entries) / 8)",
    "layer_chunk": "layer_count",
    "scalar_chunk": "3",
}
"""Numbers a point in a blob, by table."""


@dataclass(frozen=True)
class StoredColumns:
    """The stored data behind a question: columns of a table, for these runs at one level; `layer` cuts one layer
    out."""

    table: str
    runs: Sequence[str]
    level: int = 1
    statistics: Sequence[str] = ()
    layer: int | None = None

    def statement(self, mark: str) -> str:
        """SQL that reads them; parameters are the run and, where there are some, the statistics."""
        data = f"{'points' if self.table == 'point_chunk' else 'data'}, point_count * {_ROWS[self.table]}"
        if self.layer is not None:
            data = f"substr(data, 1 + 8 * point_count * {self.layer}, 8 * point_count), point_count"
        if self.table == "scalar_chunk":
            return f"SELECT {data} FROM scalar_chunk WHERE run_id = {mark} AND name = 'loss' ORDER BY part"
        place = f"run_id = {mark} AND attempt = 1 AND level = {self.level}"
        if not self.statistics:
            return f"SELECT {data} FROM {self.table} WHERE {place} ORDER BY chunk, part"
        keys = ", ".join([mark] * len(self.statistics))
        wanted = f"SELECT entry FROM entry WHERE run_id = {mark} AND key IN ({keys})"
        return f"SELECT {data} FROM {self.table} WHERE {place} AND entry IN ({wanted}) ORDER BY entry, chunk, part"

    def parameters(self, run: str) -> tuple[str, ...]:
        """The statement's parameters for one run."""
        return (run, run, *self.statistics) if self.statistics else (run,)

    def read(self, cursor: Any, mark: str) -> int:
        """Read them and add up all that is in them; how many numbers that was."""
        count, statement = 0, self.statement(mark)
        for run in self.runs:
            rows = cursor.execute(statement, self.parameters(run)).fetchall()
            values = np.concatenate([np.zeros(0, np.uint8), *(unpack_numbers(*row) for row in rows)]).view("<f8")
            np.add.reduce(values)
            count += len(values)
        return count


@dataclass(frozen=True)
class StoredRows:
    """The stored data behind a question: all rows of these runs in these tables; `counted`: how healthy all runs
    are."""

    tables: Sequence[str]
    runs: Sequence[str]
    counted: bool = False

    def read(self, cursor: Any, mark: str) -> int:
        """Read them; how many values that was."""
        marks, count = ", ".join([mark] * len(self.runs)), 0
        for table in self.tables:
            rows = cursor.execute(f"SELECT * FROM {table} WHERE run_id IN ({marks})", tuple(self.runs)).fetchall()
            count += sum(map(len, rows))
        if self.counted:
            cursor.execute(_COUNT).fetchall()
        return count


Stored = StoredColumns | StoredRows


@dataclass(frozen=True)
class Question:
    """Paths requested one after the other, with `{points}` replaced, and the stored data behind them.

    `limits` are how many times the reference the median may take, warm (CPU) and cold (time), on SQLite and then on
    PostgreSQL, two to three times what was measured; None is stated, not held.
    """

    name: str
    paths: list[str]
    points: int
    columns: Sequence[Stored]
    limits: tuple[tuple[float, float], tuple[float, float]] | None = None


@dataclass
class MeasuredDatabase:
    """A full database, its answers, and its measurements by figure and question."""

    kind: str
    folder: Path
    data: Path
    database: str | None = None
    postgres: int | None = None
    seconds: float = 0.0
    answers: dict[str, list[Any]] = field(default_factory=dict)
    measured: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def note(self, figure: str, question: Question, value: float) -> None:
        """One more round's value."""
        self.measured.setdefault(figure, {}).setdefault(question.name, []).append(value)

    @contextmanager
    def reference(self) -> Iterator[Callable[[Question, list[Any]], tuple[float, float]]]:
        """Measures a question's reference, (milliseconds, CPU in milliseconds), on a connection of its own."""
        opened: Any = sqlite3.connect(self.data) if self.database is None else psycopg.connect(self.database)
        cursor = opened.cursor() if self.database is None else opened.cursor(binary=True)

        def measure_reference(question: Question, answers: list[Any]) -> tuple[float, float]:
            started, before = time.perf_counter(), self._cpu_seconds()
            read_by_key(cursor, question.columns, "?" if self.database is None else "%s")
            msgspec.json.encode(answers)
            return 1e3 * (time.perf_counter() - started), 1e3 * (self._cpu_seconds() - before)

        try:
            yield measure_reference
        finally:
            opened.close()

    def _cpu_seconds(self) -> float:
        return time.process_time() + (0.0 if self.postgres is None else cpu_seconds(self.postgres))


def read_by_key(cursor: Any, columns: Sequence[Stored], mark: str) -> int:
    """Read these; how many numbers that was."""
    return sum(entry.read(cursor, mark) for entry in columns)


def questions() -> list[Question]:
    """What the dashboard asks. Points are read at the level that leaves at least half of those asked for."""
    ten, fifty = ("&".join(f"run={run}" for run in runs) for runs in (_TEN, _FIFTY))
    layer = f"{_EDQ}&layer=layer.{_LAYER}"

    def layered(run: str) -> list[StoredColumns]:
        return [StoredColumns("point_chunk", [run], 16), StoredColumns("layer_chunk", [run], 16, EDQ)]

    def model(runs: Sequence[str]) -> list[StoredColumns]:
        return [StoredColumns("point_chunk", runs, 16), StoredColumns("model_chunk", runs, 16)]

    one_layer = [StoredColumns("point_chunk", _TEN), StoredColumns("layer_chunk", _TEN, 1, _INTERVAL, _LAYER)]
    return [
        Question(
            "heatmap, 2,000 points × 200 layers",
            [f"/runs/layers-0/heatmap?{_EDQ}"],
            200,
            layered("layers-0"),
            ((30, 40), (20, 10)),
        ),
        Question(
            "heatmap, 10,000 points × 200 layers",
            [f"/runs/layers-long/heatmap?{_EDQ}"],
            200,
            layered("layers-long"),
            ((15, 30), (15, 10)),
        ),
        Question("one layer over 10 runs", [f"/compare?{ten}&{layer}"], 1000, one_layer, ((2, 6), (10, 10))),
        Question("one layer, 10 runs one by one", [f"/runs/{run}/series?{layer}" for run in _TEN], 1000, one_layer),
        Question("50 runs × 10,000 points", [f"/compare?{fifty}&{_EDQ}"], 1000, model(_FIFTY), ((6, 10), (5, 6))),
        Question(
            "a curve of 100,000 points",
            [f"/runs/model-long/series?{_EDQ}"],
            1000,
            model(["model-long"]),
            ((7, 8), (8, 10)),
        ),
        Question(
            "a loss of 100,000 points",
            [f"/runs/model-long/series?metric=loss&{_POINTS}"],
            1000,
            [StoredColumns("scalar_chunk", ["model-long"])],
            ((10, 8), (12, 12)),
        ),
    ]


def ask(connection: Connection, question: Question, fewer: int = 0) -> tuple[float, list[Any]]:
    """(milliseconds from asking to the last byte, the answers); `fewer` points make it a new question."""
    started, bodies = time.perf_counter(), []
    for path in question.paths:
        bodies.append(connection.get(path.format(points=question.points - fewer)))
    return 1e3 * (time.perf_counter() - started), [msgspec.json.decode(body) for body in bodies]


def measure(options: Options) -> Measuring:
    """Populate, then ask every question of both databases, warm and cold."""
    notes = yield from measure_answers(
        options, questions(), partial(populate, families=FAMILIES, seed=options.seed)
    )
    return [f"{numbers_in(FAMILIES) / 1e6:.0f} M numbers on each", *notes]


def measure_answers(options: Options, asked: Sequence[Question], fill: Callable[[Store], Any]) -> Measuring:
    """Fill both databases, then ask both, warm and cold."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    asked = [question for question in asked if question.limits is not None or not options.gate]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = root / "collage.sqlite"
        sides = [_filled("SQLite", UnsyncedStore(file, stale_after_seconds=600.0), fill, root, file)]
        found = stack.enter_context(run_cluster())
        if found is not None:
            data = Path(found[0].partition("host=")[2]) / "data"
            store = PostgresqlStore(found[0], stale_after_seconds=600.0)
            sides.append(_filled("PostgreSQL", store, fill, root, data, *found))
        _warm(sides, asked, rounds)
        for place, side in enumerate(sides):
            yield from _ratios(side, place, asked, "CPU of a warm answer")
            yield from _times(side, asked, "answer", "reference", "CPU", "reference, CPU", "asked again")
        for _ in range(GATE_COLD_ROUNDS if options.gate else COLD_ROUNDS):
            for question in asked:
                for side in sides:
                    _cold(side, question)
    for place, side in enumerate(sides):
        yield from _ratios(side, place, asked, "cold answer's time")
        yield from _times(side, asked, "cold answer", "cold reference")
    notes = [f"{rounds} rounds, databases and questions in turns"]
    notes += [f"{side.kind}: filled in {side.seconds:.0f} s" for side in sides]
    if found is None:
        notes.append("no PostgreSQL programs on this machine: only SQLite was measured")
    return notes


def _filled(
    kind: str, store: Store, fill: Callable[[Store], Any], folder: Path, data: Path, *postgres: Any
) -> MeasuredDatabase:
    started = time.perf_counter()
    store.open()
    fill(store)
    if postgres:
        with store.engine.begin() as connection:
            connection.execute(text("ANALYZE"))
    store.close()
    database, number = postgres or (None, None)
    return MeasuredDatabase(kind, folder, data, database, number, time.perf_counter() - started)


def _serve(stack: ExitStack, side: MeasuredDatabase) -> tuple[ServerProcess, Connection]:
    kind = "sqlite" if side.database is None else "postgresql"
    server = stack.enter_context(run_server(kind, side.folder, side.database, side.postgres))
    return server, stack.enter_context(Connection(server.port))


def _warm(sides: Sequence[MeasuredDatabase], asked: Sequence[Question], rounds: int) -> None:
    with ExitStack() as stack:
        served = [(side, *_serve(stack, side), stack.enter_context(side.reference())) for side in sides]
        for question in asked:
            for side, _, connection, reference in served:
                _, side.answers[question.name] = ask(connection, question)
                reference(question, side.answers[question.name])
        for number in range(1, rounds + 1):
            for question in asked:
                for side, server, connection, reference in served:
                    known = [reference(question, side.answers[question.name]) for _ in range(3)]
                    read, read_cpu = map(statistics.median, zip(*known, strict=True))
                    before = server.cpu_seconds()
                    side.note("answer", question, ask(connection, question, number)[0])
                    cpu = 1e3 * (server.cpu_seconds() - before)
                    side.note("CPU", question, cpu)
                    side.note("reference", question, read)
                    side.note("reference, CPU", question, read_cpu)
                    side.note("CPU of a warm answer", question, cpu / read_cpu)
                    side.note("asked again", question, ask(connection, question, number)[0])


def _cold(side: MeasuredDatabase, question: Question) -> None:
    """The first answer of a fresh server, beside the first read of a fresh connection."""
    _forget(side.data)
    with side.reference() as reference:
        known, _ = reference(question, side.answers[question.name])
    _forget(side.data)
    with ExitStack() as stack:
        took, _ = ask(_serve(stack, side)[1], question)
    side.note("cold reference", question, known)
    side.note("cold answer", question, took)
    side.note("cold answer's time", question, took / known)


def _forget(data: Path) -> None:
    """Drop a file, or all files below a folder, from the page cache."""
    for path in [data] if data.is_file() else [path for path in data.rglob("*") if path.is_file()]:
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except FileNotFoundError:
            continue


def _ratios(side: MeasuredDatabase, place: int, asked: Sequence[Question], what: str) -> Iterator[Figure]:
    """Beside the reference; the first limit of a question is in CPU when warm, the second in time when cold."""
    for question in asked:
        limit = None if question.limits is None else question.limits[place][what.startswith("cold")]
        values = tuple(side.measured[what][question.name])
        yield Figure(f"{side.kind}: {question.name}, {what} / reference", "×", values, limit)


def _times(side: MeasuredDatabase, asked: Sequence[Question], *names: str) -> Iterator[Figure]:
    for what in names:
        for question in asked:
            yield Figure(f"{side.kind}: {question.name}, {what}", "ms", tuple(side.measured[what][question.name]))


if __name__ == "__main__":
    sys.exit(main("query", __doc__ or "", measure))
