"""Chunks become archived files: four of level 1, 64 of level 16, and what is left once the run is over.

A file is made from a snapshot without a claim, as parts of chunks never change. It is put where it stays, and only
then a short transaction names it, if the chunks still have the parts that it holds. Then the rows that it replaces
are deleted, in transactions as short as those of retention. A process that is killed in between leaves a file that
no row names (`Archiving.sweep` removes it), or rows that are not read any more (the next round deletes them).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from sqlalchemy import Connection, and_, delete, or_, select, update

from collage_server.memory import hold, released_afterwards
from collage_server.store import schema
from collage_server.store.archive.files import ArchiveFiles, archived_path, run_of
from collage_server.store.archive.parquet import Contents, Footer, HeldPart, layers_in_group, write_layers
from collage_server.store.archive.segments import Segment, add_segment
from collage_server.store.chunks.blobs import (
    LEVELS,
    ChunkInfo,
    PointRows,
    read_chunk_infos,
    read_layer_data,
    read_point_rows,
)
from collage_server.store.engine.database import Database
from collage_server.store.reading.run_view import RunView
from collage_server.store.records import FloatArray
from collage_server.store.rows import require_run
from collage_server.store.runs.latest import all_ranks_are_through
from collage_server.store.runs.run_store import read_run
from collage_server.store.sealing.slices import SliceDeletion

__all__ = ["Archiving"]

_LOG: Final = logging.getLogger(__name__)
_CHUNKS: Final = {1: 4, 16: 64}
"""Chunks of a file by level: with more a question about few of its points costs more, with fewer one about many."""
_MOST_CHUNKS: Final = 512
"""Of a file at any other level, and in one statement that deletes their rows."""
_FILES_A_SLICE: Final = 256
_GRACE_SECONDS: Final = 3600.0
"""Longer than any reader's snapshot lasts, and than it takes from a file to the row that names it."""
_READ_BYTES: Final = 2**25
"""Layer totals that are read at once."""
_COPIES: Final = 3
"""Of these: as they were read, in the order of a file's rows, encoded."""
_Chunks = dict[tuple[int, int], set[int]]
"""(attempt, level) → numbers of chunks."""


@dataclass(frozen=True)
class _Plan:
    """Chunks of an attempt that become a file at a level."""

    attempt: int
    level: int
    chunks: tuple[int, ...]


class Archiving:
    """Makes archived files of a run's chunks, and deletes the rows that they replace."""

    def __init__(self, database: Database, files: ArchiveFiles, deletion: SliceDeletion) -> None:
        self._database = database
        self.files = files
        self._deletion = deletion

    def archive(self, run_id: str) -> bool:
        """Make the next file of the run, if one is due; True if there may be more to do.

        Raises:
            NotFound, Gone: the run is not there.
            Busy: the archive cannot take a file now.
        """
        with self._database.reading() as connection:
            plan = self._next(connection, run_id)
            unfinished = _segments_with_rows(connection, run_id)
        for path, contents in unfinished:
            self._delete_rows(path, contents)
        return plan is not None and self._make(run_id, plan)

    def sweep(self, now: float) -> int:
        """Remove files that no reader can still want: named no more, or never, for an hour; how many went.

        Raises:
            Busy: the archive does not answer.
        """
        table = schema.segment_gone
        with self._database.reading() as connection:
            before = self._database.time(connection, now) - _GRACE_SECONDS
            gone = list(connection.execute(select(table.c.path).where(table.c.gone_at < before)).scalars())
        self._remove(gone)
        # By the clock of who keeps the files: all are listed first, so that what is being named now is not old.
        old = [file.path for file in self.files.stored() if file.modified_at < now - _GRACE_SECONDS]
        orphans = self._unnamed(old)
        self.files.delete(orphans)
        self.files.sweep_staging(_GRACE_SECONDS)
        return len(gone) + len(orphans)

    def _remove(self, paths: Sequence[str]) -> None:
        table = schema.segment_gone
        for start in range(0, len(paths), _FILES_A_SLICE):
            some = paths[start : start + _FILES_A_SLICE]
            self.files.delete(some)
            with self._database.freeing() as connection:
                connection.execute(delete(table).where(table.c.path.in_(some)))

    def _unnamed(self, paths: Sequence[str]) -> list[str]:
        """Those that no row names, of runs that this database knows: the others are another database's."""
        named: set[str] = set()
        known: set[str] = set()
        for start in range(0, len(paths), _FILES_A_SLICE):
            some = paths[start : start + _FILES_A_SLICE]
            runs = {run_of(path) for path in some}
            with self._database.reading() as connection:
                for table in (schema.segment, schema.segment_gone):
                    named.update(connection.execute(select(table.c.path).where(table.c.path.in_(some))).scalars())
                for table in (schema.run, schema.deleted_run):
                    known.update(
                        connection.execute(select(table.c.run_id).where(table.c.run_id.in_(runs))).scalars()
                    )
        strange = sum(run_of(path) not in known for path in paths)
        if strange:
            _LOG.warning(
                "%d archived files are of runs that this database does not know, and stay: give each database an "
                "archive of its own",
                strange,
            )
        return [path for path in paths if path not in named and run_of(path) in known]

    def _next(self, connection: Connection, run_id: str) -> _Plan | None:
        record = read_run(connection, run_id)
        over = record.state != "running" and all_ranks_are_through(connection, run_id)
        infos = read_chunk_infos(connection, [run_id])[run_id]
        held = _with_layers(connection, run_id)
        return next(_due(infos, held, _archived(connection, run_id), over=over), None)

    def _make(self, run_id: str, plan: _Plan) -> bool:
        with self.files.new_file() as made, released_afterwards():
            hold(_COPIES * _READ_BYTES)
            with self._database.reading() as connection:
                view = RunView(connection, run_id)
                project = read_run(connection, run_id).project
                chunks = {(run_id, plan.attempt): plan.chunks}
                keys = _keys_of(connection, view, plan)
                if not keys:
                    # Another server has made the file meanwhile, and its rows are gone.
                    return True
                points = read_point_rows(connection, plan.level, chunks)
                contents = Contents(
                    run_id=run_id,
                    attempt=plan.attempt,
                    level=plan.level,
                    parts=tuple(_parts(points)),
                    layers=len(view.layers),
                    layers_a_group=layers_in_group(len(points.steps)),
                )
                groups = self._groups(view, contents, points, keys)
                footer = write_layers(made, contents, points, list(view.layers), keys, groups)
            size = made.stat().st_size
            first, last = plan.chunks[0], plan.chunks[-1]
            name = f"{first}-{last}-{uuid.uuid4().hex}.parquet"
            path = archived_path(project, run_id, plan.attempt, plan.level, name)
            self.files.put(made, path)
        segment = Segment(run_id, plan.attempt, plan.level, first, last, path, size, footer)
        if not self._name(segment, contents):
            return False
        self._delete_rows(path, contents)
        return True

    def _groups(
        self, view: RunView, contents: Contents, points: PointRows, keys: Sequence[str]
    ) -> Iterator[FloatArray]:
        """Totals of each row group's layers, read so many at a time that they take little memory."""
        chunks = {(view.run_id, contents.attempt): sorted({part.chunk for part in contents.parts})}
        group, layers = contents.layers_a_group, contents.layers
        width = group * max(_READ_BYTES // (8 * group * len(keys) * max(contents.points, 1)), 1)
        entries = {view.run_id: view.entries}
        for start in range(0, layers, width):
            positions = {view.run_id: np.arange(start, min(start + width, layers), dtype=np.int64)}
            totals = read_layer_data(
                view.connection,
                contents.level,
                chunks,
                points,
                entries,
                keys,
                positions,
                neighbours=True,
                by_layer=True,
            )
            for first in range(0, totals.shape[2], group):
                yield totals[:, :, first : first + group]

    def _name(self, segment: Segment, contents: Contents) -> bool:
        """Let readers use the file; False where its chunks have changed meanwhile, or others seal the run now."""
        with self._database.claimed(segment.run_id) as mine:
            if not mine:
                return False
            with self._database.writing_claimed() as connection:
                require_run(connection, segment.run_id, lock=True)
                owner = (segment.run_id, segment.attempt)
                chunks = {owner: sorted({part.chunk for part in contents.parts})}
                points = read_point_rows(connection, segment.level, chunks)
                if tuple(_parts(points)) != contents.parts or _is_archived(connection, segment):
                    return False
                add_segment(connection, segment)
                return True

    def _delete_rows(self, path: str, contents: Contents) -> None:
        table = schema.layer_chunk
        newest = {part.chunk: part.part for part in contents.parts}
        where = (
            table.c.run_id == contents.run_id,
            table.c.attempt == contents.attempt,
            table.c.level == contents.level,
            or_(*(and_(table.c.chunk == chunk, table.c.part <= part) for chunk, part in newest.items())),
        )
        while self._deletion.delete_slice(table, *where):
            pass
        with self._database.freeing() as connection:
            connection.execute(update(schema.segment).where(schema.segment.c.path == path).values(has_rows=False))


def _due(infos: Sequence[ChunkInfo], held: _Chunks, archived: _Chunks, *, over: bool) -> Iterator[_Plan]:
    """What is to become a file, oldest first: groups of whole chunks; of an attempt that ended all that is left.

    Only chunks that hold layers (`held`) do, and are in no file yet.

    Its last chunk, which has no coarse levels, is a file of its own: coarse questions read it beside them.
    """
    newest = max((info.attempt for info in infos), default=0)
    for attempt, members in groupby(infos, lambda info: info.attempt):
        own = list(members)
        for level in LEVELS:
            left = held.get((attempt, level), set()) - archived.get((attempt, level), set())
            chunks = [info for info in own if level in info.levels and info.chunk in left]
            for plan in _groups(attempt, level, chunks):
                if over or attempt < newest or _is_whole(plan, own[-1].chunk):
                    yield plan


def _groups(attempt: int, level: int, infos: Sequence[ChunkInfo]) -> Iterator[_Plan]:
    size = _CHUNKS.get(level, _MOST_CHUNKS)
    for _, members in groupby(infos, lambda info: (info.chunk // size, LEVELS[1] in info.levels)):
        yield _Plan(attempt, level, tuple(info.chunk for info in members))


def _is_whole(plan: _Plan, newest: int) -> bool:
    """Whether it has all chunks of its group, without the attempt's newest one."""
    return len(plan.chunks) == _CHUNKS.get(plan.level, _MOST_CHUNKS) and plan.chunks[-1] < newest


def _with_layers(connection: Connection, run_id: str) -> _Chunks:
    """Chunks that hold layers in the database."""
    table = schema.layer_chunk
    columns = (table.c.attempt, table.c.level, table.c.chunk)
    found: _Chunks = {}
    for attempt, level, chunk in connection.execute(select(*columns).where(table.c.run_id == run_id).distinct()):
        found.setdefault((attempt, level), set()).add(chunk)
    return found


def _archived(connection: Connection, run_id: str) -> _Chunks:
    """Chunks that stand in files."""
    table = schema.segment
    columns = (table.c.attempt, table.c.level, table.c.first_chunk, table.c.last_chunk)
    found: _Chunks = {}
    for attempt, level, first, last in connection.execute(select(*columns).where(table.c.run_id == run_id)):
        found.setdefault((attempt, level), set()).update(range(first, last + 1))
    return found


def _is_archived(connection: Connection, segment: Segment) -> bool:
    table = schema.segment
    same = (table.c.run_id == segment.run_id, table.c.attempt == segment.attempt, table.c.level == segment.level)
    inside = (table.c.first_chunk <= segment.last_chunk, table.c.last_chunk >= segment.first_chunk)
    return connection.execute(select(table.c.path).where(*same, *inside)).first() is not None


def _segments_with_rows(connection: Connection, run_id: str) -> list[tuple[str, Contents]]:
    table = schema.segment
    rows = connection.execute(
        select(table.c.path, table.c.footer).where(table.c.run_id == run_id, table.c.has_rows)
    )
    return [(row.path, Footer.of(row.footer).contents) for row in rows]


def _keys_of(connection: Connection, view: RunView, plan: _Plan) -> list[str]:
    """What the chunks hold by layer."""
    table = schema.layer_chunk
    statement = (
        select(table.c.entry)
        .distinct()
        .where(
            table.c.run_id == view.run_id,
            table.c.attempt == plan.attempt,
            table.c.level == plan.level,
            table.c.chunk.in_(plan.chunks),
        )
    )
    there = set(connection.execute(statement).scalars())
    return [key for key, entry in view.entries.items() if entry in there]


def _parts(points: PointRows) -> Iterator[HeldPart]:
    ends = [*list(points.where.values())[1:], len(points.steps)]
    for (place, start), end in zip(points.where.items(), ends, strict=True):
        yield HeldPart(place[2], place[3], end - start)
