"""Finished runs that are completely archived: the source of tables for other engines.

It takes each chunk's finest remaining level, and of that the points that no newer attempt hides. So every visible
measured step is in exactly one row per layer, for any reader of the files together.

`publishing.py` asks it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, select

from collage_server.store import schema
from collage_server.store.archive.archived_file import ArchivedFile
from collage_server.store.archive.parquet import Footer
from collage_server.store.archive.segments import LOGGED, footer_of
from collage_server.store.chunks.blobs import ChunkInfo, read_chunk_infos
from collage_server.store.engine.database import Database
from collage_server.store.records import UNBOUNDED, RunRecord, first_hidden_steps
from collage_server.store.row_checks import whole_of
from collage_server.store.row_helpers import from_json
from collage_server.store.runs.run_store import read_records

__all__ = ["FinishedRun", "FinishedRuns", "LatePoints", "VisiblePart"]

_RUNS_A_READING: Final = 256
_Chunk = tuple[int, int, int]
"""Attempt, level and number."""
_OF_A_SEGMENT: Final = ("attempt", "level", "first_chunk", "last_chunk", "path", "bytes", "digest")


class LatePoints(NamedTuple):
    """Steps of which reports came late: several rows of the file are one point, or some points are in no file.

    They are read as an answer reads them. `parts`: the number of parts of each chunk.
    """

    first_step: int
    last_step: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class VisiblePart:
    """The part of an archived file that is visible and in no file of a finer level.

    `chunks` None: all of it. Else the points of these chunks before the step `before`.
    """

    attempt: int
    level: int
    file: ArchivedFile
    chunks: tuple[int, ...] | None = None
    before: int = UNBOUNDED
    late: LatePoints | None = None


@dataclass(frozen=True)
class FinishedRun:
    """A finished run with its description; `elements`: of all layers together."""

    record: RunRecord
    elements: int
    layers: int
    health: str | None
    findings: Mapping[str, float]
    files: tuple[VisiblePart, ...]


class FinishedRuns:
    """Runs that are over and archived as a whole."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def projects(self) -> list[str]:
        """Every project that has runs."""
        column = schema.run.c.project
        with self._database.reading() as connection:
            return list(connection.execute(select(column).distinct().order_by(column)).scalars())

    def of(self, project: str) -> list[FinishedRun]:
        """The project's runs, oldest first. A run of which something still waits to be archived is left out."""
        with self._database.reading() as connection:
            ids = list(connection.execute(_archived_runs(project)).scalars())
        found: list[FinishedRun] = []
        for start in range(0, len(ids), _RUNS_A_READING):
            with self._database.reading() as connection:
                # Asked again: one may have been deleted or resumed since.
                among = ids[start : start + _RUNS_A_READING]
                some = list(connection.execute(_archived_runs(project, among)).scalars())
                found += _runs(connection, some)
        return found

    def footers(self, paths: Collection[str]) -> dict[str, Footer]:
        """Footers of these files by path, without those that are no longer named."""
        table, found = schema.segment, {}
        for path in paths:
            with self._database.reading() as connection:
                statement = select(table).where(table.c.path == path)
                row = connection.execute(statement.execution_options(blobs=True)).first()
            if row is not None:
                found[path] = footer_of(row)
        return found


def _archived_runs(project: str, among: Sequence[str] | None = None) -> Any:
    """Ids of runs that are over and of which neither the journal nor chunks hold layers, but what came late."""
    run, chunk, report, segment = schema.run, schema.layer_chunk, schema.report, schema.segment
    chosen = [run.c.project == project, run.c.state != "running"]
    chosen += [] if among is None else [run.c.run_id.in_(among)]
    same = (segment.c.run_id == chunk.c.run_id, segment.c.attempt == chunk.c.attempt)
    around = (segment.c.level == chunk.c.level, chunk.c.chunk.between(segment.c.first_chunk, segment.c.last_chunk))
    # Rows that came after their chunk's file stay where they are.
    late = select(segment.c.run_id).where(*same, *around, ~segment.c.has_rows).correlate(chunk).exists()
    # What was only logged is not published: a second writer may go on long after the end.
    waiting = (
        select(table.c.run_id).where(table.c.run_id == run.c.run_id, *where).correlate(run).exists()
        for table, where in ((chunk, (~late,)), (report, (report.c.model.is_not(None),)))
    )
    return (
        select(run.c.run_id).where(*chosen, *(~some for some in waiting)).order_by(run.c.created_at, run.c.run_id)
    )


def _runs(connection: Connection, ids: Sequence[str]) -> list[FinishedRun]:
    records = read_records(connection, ids)
    infos = read_chunk_infos(connection, ids)
    segments = _rows_by_run(connection, schema.segment, _OF_A_SEGMENT, ids)
    attempts = _rows_by_run(connection, schema.measured_attempt, ("attempt", "measured_from"), ids)
    numbered = _rows_by_run(connection, schema.attempt, ("attempt",), ids)
    shapes = _rows_by_run(connection, schema.layer, ("shape",), ids)
    summary = schema.run_summary
    whole, _ = whole_of(connection, select(summary).where(summary.c.run_id.in_(ids)), summary)
    overviews = {row.run_id: row for row in whole}
    late = _late_chunks(connection, ids)
    found = []
    for run_id, record in records.items():
        measured = {row.attempt: row.measured_from for row in attempts[run_id]}
        bounds = first_hidden_steps((row.attempt, measured.get(row.attempt)) for row in numbered[run_id])
        said = overviews.get(run_id)
        found.append(
            FinishedRun(
                record=record,
                elements=sum(math.prod(from_json(row.shape)) for row in shapes[run_id]),
                layers=len(shapes[run_id]),
                health=said.health if said else None,
                findings={entry["key"]: entry["value"] for entry in from_json(said.findings)}
                if said and said.findings
                else {},
                files=tuple(_visible_parts(segments[run_id], infos[run_id], bounds, late[run_id])),
            )
        )
    return found


def _visible_parts(
    segments: Sequence[Row[Any]], infos: Sequence[ChunkInfo], bounds: Mapping[int, int], late: Collection[_Chunk]
) -> Iterator[VisiblePart]:
    for segment in segments:
        if segment.level <= LOGGED:
            continue
        before = bounds.get(segment.attempt, UNBOUNDED)
        held = [
            info
            for info in infos
            if info.attempt == segment.attempt and segment.first_chunk <= info.chunk <= segment.last_chunk
        ]
        kept = [info for info in held if min(info.levels) == segment.level and info.first_step < before]
        file = ArchivedFile(segment.path, segment.bytes, segment.digest)
        place = (segment.attempt, segment.level, file)
        chunks = tuple(info.chunk for info in kept)
        if any((segment.attempt, segment.level, chunk) in late for chunk in chunks):
            parts = tuple(info.parts for info in kept)
            yield VisiblePart(*place, chunks, before, LatePoints(kept[0].first_step, kept[-1].last_step, parts))
        elif len(kept) == len(held) and all(info.last_step < before for info in kept):
            yield VisiblePart(*place)
        elif kept:
            yield VisiblePart(*place, chunks, before)


def _late_chunks(connection: Connection, ids: Sequence[str]) -> dict[str, set[_Chunk]]:
    """Chunks by run of which a part repeats steps of an earlier one, or rows are left beside their file."""
    found: dict[str, set[_Chunk]] = {run_id: set() for run_id in ids}
    places = ("attempt", "level", "chunk")
    for run_id, rows in _rows_by_run(connection, schema.layer_chunk, places, ids, distinct=True).items():
        found[run_id].update((row.attempt, row.level, row.chunk) for row in rows)
    columns = (*places, "part", "first_step", "last_step")
    for run_id, rows in _rows_by_run(connection, schema.point_chunk, columns, ids).items():
        last: dict[_Chunk, int] = {}
        for row in sorted(rows, key=itemgetter(*range(1, 5))):
            chunk = (row.attempt, row.level, row.chunk)
            if row.first_step <= last.get(chunk, -1):
                found[run_id].add(chunk)
            last[chunk] = max(row.last_step, last.get(chunk, -1))
    return found


def _rows_by_run(
    connection: Connection, table: Any, columns: Sequence[str], ids: Sequence[str], *, distinct: bool = False
) -> dict[str, list[Row[Any]]]:
    found: dict[str, list[Row[Any]]] = {run_id: [] for run_id in ids}
    chosen = select(table.c.run_id, *(table.c[name] for name in columns)).where(table.c.run_id.in_(list(ids)))
    for row in connection.execute(chosen.distinct() if distinct else chosen):
        found[row.run_id].append(row)
    return found
