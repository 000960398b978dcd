"""Chunks become archived files: four of level 1, 64 of level 16, and the rest once the run is over.

Then the model's totals and the logged values of its attempts follow, without attempts that newer ones hide as a
whole. Points stay rows, by which all is found; those of single steps are packed.

A file is made from a snapshot without a claim, as parts of chunks never change. It is put where it stays, and only
then a short transaction names it, if the chunks still have the parts that it holds. Then the rows that it replaces
are deleted, in transactions as short as those of retention. A process that is killed in between leaves a file that
no row names (`Archiving.sweep` removes it), or rows that are not read any more (the next round deletes them).

`archiver.py` calls it. Sizes of files are free (`archive_plan.py`), their form is `archive/parquet.py`'s. That an
answer does not change, wherever a process is killed, is fixed (`tests/server/store/test_archived.py`,
`test_archive_faults.py`).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row, and_, delete, func, insert, or_, select, tuple_, update

from collage_server.errors import Busy, StoreUnusable
from collage_server.memory_budget import hold, released_afterwards
from collage_server.store import schema
from collage_server.store.archive.archived_file import ArchivedFile, digest_of
from collage_server.store.archive.file_storage import ArchiveFiles
from collage_server.store.archive.logged_values import write_logged
from collage_server.store.archive.parquet import (
    Contents,
    HeldPart,
    LoggedSeries,
    layers_in_group,
    write_layers,
)
from collage_server.store.archive.paths import archived_path, run_of
from collage_server.store.archive.segments import (
    LOGGED,
    Segment,
    Verification,
    add_segment,
    footer_of,
    model_level,
    require_own_archive,
)
from collage_server.store.chunks.blobs import (
    LEVELS,
    PointRows,
    packed,
    read_layer_data,
    read_model_data,
    read_point_rows,
)
from collage_server.store.engine.database import Database
from collage_server.store.reading.logged_scalars import (
    LoggedPart,
    of_series,
    read_logged_parts,
    read_logged_tables,
)
from collage_server.store.reading.run_view import RunView
from collage_server.store.records import FloatArray
from collage_server.store.row_checks import point_checks, require_points
from collage_server.store.row_helpers import int_array, require_run
from collage_server.store.sealing.archive_plan import (
    FilePlan,
    is_over,
    plan_file,
    rows_behind,
    visible_attempts,
)
from collage_server.store.sealing.slice_deletion import SliceDeletion

__all__ = ["Archiving"]

_LOG: Final = logging.getLogger(__name__)
_FILES_A_SLICE: Final = 256
_GRACE_SECONDS: Final = 3600.0
"""Longer than any reader's snapshot lasts, and than it takes from a file to the row that names it."""
_READ_BYTES: Final = 2**25
"""Layer totals that are read at once."""
_COPIES: Final = 3
"""Of these: as they were read, in the order of a file's rows, encoded."""
_LOGGED_ROWS: Final = 2048
"""Of `scalar_chunk` that one file takes the place of: they go in one transaction with the row that names it."""
_POINT_BYTES: Final = 40
_POINTS_A_SLICE: Final = 16
_RETRY_SECONDS: Final = 600


class Archiving:
    """Makes archived files of a run's chunks, and deletes the rows that they replace."""

    def __init__(self, database: Database, files: ArchiveFiles, deletion: SliceDeletion) -> None:
        self._database = database
        self.files = files
        self.verification = Verification(database, files)
        self._deletion = deletion

    def archive(self, run_id: str) -> bool:
        """Make the next file of the run, if one is due; True if there may be more to do.

        Raises:
            NotFound, Gone: the run is not there.
            Busy: the archive cannot take a file now.
        """
        with self._database.reading() as connection:
            over = is_over(connection, run_id)
            plan = plan_file(connection, run_id, over=over)
            unfinished = _segments_with_rows(connection, run_id)
        for path, contents in unfinished:
            self._delete_rows(path, contents)
        if plan is None:
            return over and self._archive_logged(run_id)
        return self._make(run_id, plan)

    def require_own(self) -> None:
        """Refuse an archive that is not this database's, as `require_own_archive`: when a store is opened."""
        require_own_archive(self._database, self.files, to_write=self.files.exists())

    def _require_still_own(self, *, to_write: bool = True) -> None:
        """Before anything is written or removed: a folder that is mounted no more looks like an empty one."""
        try:
            require_own_archive(self._database, self.files, to_write=to_write)
        except StoreUnusable as error:
            raise Busy(error.message, retry_after_seconds=_RETRY_SECONDS) from error

    def sweep(self, now: float) -> int:
        """Remove files that no reader can still want: named no more, or never, for an hour; how many went.

        Raises:
            Busy: the archive does not answer.
        """
        self._require_still_own(to_write=False)
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

    def _make(self, run_id: str, plan: FilePlan) -> bool:
        self._require_still_own()
        with self.files.new_file() as made, released_afterwards():
            hold(_COPIES * _READ_BYTES)
            with self._database.reading() as connection:
                view = RunView(connection, run_id)
                project = require_run(connection, run_id, "project").project
                chunks = {(run_id, plan.attempt): plan.chunks}
                keys, ranks = _held_by(connection, view, plan)
                if not keys:
                    # Another server has made the file meanwhile, and its rows are gone.
                    return True
                points = read_point_rows(connection, abs(plan.level), chunks)
                contents = Contents(
                    run_id=run_id,
                    attempt=plan.attempt,
                    level=plan.level,
                    parts=tuple(_parts(points)),
                    layers=len(ranks or view.layers),
                    layers_a_group=1 if ranks else layers_in_group(len(points.steps)),
                    ranks=ranks,
                )
                groups = (self._of_ranks if ranks else self._groups)(view, contents, points, keys)
                footer = write_layers(made, contents, points, list(view.layers), keys, groups)
            file = self._put(made, project, contents, plan.chunks[0], plan.chunks[-1])
        segment = Segment(run_id, plan.attempt, plan.level, plan.chunks[0], plan.chunks[-1], file, footer)
        if not self._name(segment, contents):
            return False
        self._delete_rows(file.path, contents)
        return True

    def _put(self, made: Path, project: str, contents: Contents, first: int, last: int) -> ArchivedFile:
        """Store the finished file, and read it back: the rows that it replaces go only then."""
        name = f"{first}-{last}-{uuid.uuid4().hex}.parquet"
        path = archived_path(project, contents.run_id, contents.attempt, contents.level, name)
        file = ArchivedFile(path, made.stat().st_size, digest_of(made))
        self.files.put(made, path)
        problem = self.files.examine(file)
        if problem is not None:
            raise Busy(
                f"the archive {self.files.address} does not keep files as they are written ({path} {problem}): "
                "check its disk",
                retry_after_seconds=_RETRY_SECONDS,
            )
        return file

    def _archive_logged(self, run_id: str) -> bool:
        """Make the next file of a finished run's logged values; True if there may be more to do."""
        with released_afterwards():
            with self._database.reading() as connection:
                found = _next_logged(connection, run_id, visible_attempts(connection, run_id))
                if found is None:
                    return False
                attempt, number, parts = found
                project = require_run(connection, run_id, "project").project
                tables = read_logged_tables(connection, run_id, parts)
            self._require_still_own()
            series = tuple(LoggedSeries(*key, table.shape[1]) for key, table in tables.items())
            contents = Contents(run_id=run_id, attempt=attempt, level=LOGGED, series=series)
            with self.files.new_file() as made:
                footer = write_logged(made, contents, tables.values())
                file = self._put(made, project, contents, number, number)
        return self._name_logged(Segment(run_id, attempt, LOGGED, number, number, file, footer), parts)

    def _name_logged(self, segment: Segment, parts: Sequence[LoggedPart]) -> bool:
        """Let readers use the file, and delete its rows at once: later ones may be numbered as they were."""
        self._database.make_room()
        with self._database.claimed(segment.run_id) as mine:
            if not mine:
                return False
            with self._database.writing_claimed() as connection:
                require_run(connection, segment.run_id, lock=True)
                keys = sorted({part[:2] for part in parts})
                if read_logged_parts(connection, segment.run_id, keys) != list(parts):
                    return False
                add_segment(connection, segment, time.time(), has_rows=False)
                connection.execute(delete(schema.scalar_chunk).where(*of_series(segment.run_id, keys)))
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

    def _of_ranks(
        self, view: RunView, contents: Contents, points: PointRows, keys: Sequence[str]
    ) -> Iterator[FloatArray]:
        """Totals of each rank, and of all together, as those of a layer."""
        chunks = {(view.run_id, contents.attempt): sorted({part.chunk for part in contents.parts})}
        entries = {view.run_id: view.entries}
        for rank in contents.ranks:
            level = abs(contents.level)
            yield read_model_data(view.connection, level, chunks, points, entries, keys, rank)[:, :, np.newaxis]

    def _name(self, segment: Segment, contents: Contents) -> bool:
        """Let readers use the file; False where its chunks have changed meanwhile, or others seal the run now."""
        with self._database.claimed(segment.run_id) as mine:
            if not mine:
                return False
            with self._database.writing_claimed() as connection:
                require_run(connection, segment.run_id, lock=True)
                owner = (segment.run_id, segment.attempt)
                chunks = {owner: sorted({part.chunk for part in contents.parts})}
                points = read_point_rows(connection, abs(segment.level), chunks)
                if tuple(_parts(points)) != contents.parts or _is_archived(connection, segment):
                    return False
                add_segment(connection, segment, time.time())
                return True

    def _delete_rows(self, path: str, contents: Contents) -> None:
        table = rows_behind(contents.level)
        newest = {part.chunk: part.part for part in contents.parts}
        where = (
            table.c.run_id == contents.run_id,
            table.c.attempt == contents.attempt,
            table.c.level == abs(contents.level),
            or_(*(and_(table.c.chunk == chunk, table.c.part <= part) for chunk, part in newest.items())),
        )
        while self._deletion.delete_slice(table, *where):
            pass
        if contents.level == model_level(LEVELS[0]):
            self._pack_points(contents)
        with self._database.freeing() as connection:
            connection.execute(update(schema.segment).where(schema.segment.c.path == path).values(has_rows=False))

    def _pack_points(self, contents: Contents) -> None:
        """Those of a running run are read too often for that."""
        table = schema.point_chunk
        for start in range(0, len(contents.parts), _POINTS_A_SLICE):
            held = [(part.chunk, part.part) for part in contents.parts[start : start + _POINTS_A_SLICE]]
            where = (
                table.c.run_id == contents.run_id,
                table.c.attempt == contents.attempt,
                table.c.level == LEVELS[0],
                tuple_(table.c.chunk, table.c.part).in_(held),
            )
            # Locked: another server that packs them meanwhile would put the same rows once more.
            chosen = select(table).where(*where).order_by(table.c.chunk, table.c.part).with_for_update()
            with self._database.freeing() as connection:
                rows = connection.execute(chosen).all()
                if any(len(row.points) == _POINT_BYTES * row.point_count for row in rows):
                    # Rows that are updated in place leave SQLite's pages half empty.
                    connection.execute(delete(table).where(*where))
                    connection.execute(insert(table), list(map(_packed_points, rows)))


def _packed_points(row: Row[Any]) -> dict[str, Any]:
    require_points(row, contributors=True)
    if len(row.points) != _POINT_BYTES * row.point_count:
        return dict(row._mapping)
    again = {**row._mapping, "points": packed(row.points)}
    return again | {"checks": point_checks(again)}


def _is_archived(connection: Connection, segment: Segment) -> bool:
    table = schema.segment
    same = (table.c.run_id == segment.run_id, table.c.attempt == segment.attempt, table.c.level == segment.level)
    inside = (table.c.first_chunk <= segment.last_chunk, table.c.last_chunk >= segment.first_chunk)
    return connection.execute(select(table.c.path).where(*same, *inside)).first() is not None


def _segments_with_rows(connection: Connection, run_id: str) -> list[tuple[str, Contents]]:
    table = schema.segment
    rows = connection.execute(select(table).where(table.c.run_id == run_id, table.c.has_rows))
    return [(row.path, footer_of(row).contents) for row in rows]


def _held_by(connection: Connection, view: RunView, plan: FilePlan) -> tuple[list[str], tuple[int, ...]]:
    """The chunks' content by layer; or of the model, and its ranks."""
    table = rows_behind(plan.level)
    of_model = table is schema.model_chunk
    columns = (table.c.entries, table.c.rank) if of_model else (table.c.entry,)
    rows: list[Row[Any]] = list(
        connection.execute(
            select(*columns)
            .distinct()
            .where(
                table.c.run_id == view.run_id,
                table.c.attempt == plan.attempt,
                table.c.level == abs(plan.level),
                table.c.chunk.in_(plan.chunks),
            )
            .execution_options(blobs=of_model)
        )
    )
    there = {entry for row in rows for entry in (int_array(row.entries).tolist() if of_model else (row.entry,))}
    ranks = tuple(sorted({row.rank for row in rows})) if of_model else ()
    return [key for key, entry in view.entries.items() if entry in there], ranks


def _next_logged(
    connection: Connection, run_id: str, attempts: Collection[int]
) -> tuple[int, int, list[LoggedPart]] | None:
    """The content of an attempt's next file of logged values, and its number; None if nothing is left."""
    table, stream, segment = schema.scalar_chunk, schema.stream, schema.segment
    same = (stream.c.run_id == table.c.run_id, stream.c.stream_id == table.c.stream_id)
    counted = select(stream.c.attempt, table.c.stream_id, table.c.name, func.count().label("parts"))
    counted = counted.join(stream, and_(*same)).where(table.c.run_id == run_id, stream.c.attempt.in_(attempts))
    grouped = counted.group_by(stream.c.attempt, table.c.stream_id, table.c.name)
    rows = connection.execute(grouped.order_by(stream.c.attempt, table.c.name, table.c.stream_id)).all()
    if not rows:
        return None
    attempt, parts = rows[0].attempt, 0
    keys: list[tuple[str, str]] = []
    for row in rows:
        if row.attempt != attempt or (keys and parts + row.parts > _LOGGED_ROWS):
            break
        keys.append((row.stream_id, row.name))
        parts += row.parts
    mine = (segment.c.run_id == run_id, segment.c.attempt == attempt, segment.c.level == LOGGED)
    newest = connection.execute(select(func.max(segment.c.first_chunk)).where(*mine)).scalar()
    return attempt, 0 if newest is None else newest + 1, read_logged_parts(connection, run_id, keys)


def _parts(points: PointRows) -> Iterator[HeldPart]:
    ends = [*list(points.where.values())[1:], len(points.steps)]
    for (place, start), end in zip(points.where.items(), ends, strict=True):
        yield HeldPart(place[2], place[3], end - start)
