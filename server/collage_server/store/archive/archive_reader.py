"""Totals and logged values out of archived files, put where a question keeps its numbers.

`reading/` and `sealing/` ask for chunks whose layers lie in files, `runs/reported_state.py` for last values. Points
equal those from rows (`tests/server/store/test_archived.py`)
(`test_archive_contents.py`).

Formats are `parquet.py`'s and `logged_values.py`'s. Fixed here: a footer never changes, so one in memory is not
asked for again until it is evicted (`_KEPT_BYTES`, free: `test_archive_contents.py`), and what is in no file
(`uncovered`) must be read from rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow
from cachetools import LRUCache
from sqlalchemy import Connection, Select, bindparam, select

from collage_server.errors import Busy, DamagedFile
from collage_server.memory_budget import hold
from collage_server.store import schema
from collage_server.store.archive.archived_file import ArchivedFile, damaged_file
from collage_server.store.archive.file_storage import ArchiveFiles
from collage_server.store.archive.logged_values import read_logged
from collage_server.store.archive.parquet import Footer, LoggedSeries, Rows, read_layers
from collage_server.store.archive.segments import FILE_COLUMNS, LOGGED, file_of, footer_of
from collage_server.store.chunks.blobs import Chunks, PointRows
from collage_server.store.records import FloatArray, IntArray
from collage_server.store.row_helpers import among

__all__ = ["ArchiveReader", "FoundSegment", "uncovered"]
_Found = TypeVar("_Found")
_KEPT_BYTES: Final = 2**25
"""Of footers in memory: one of 4,000 layers of 12 statistics takes 15 MiB."""
_RETRY_SECONDS: Final = 600
_LOGGED_BYTES: Final = 4 * 24
"""Of a logged value, as often as it stands in memory while an answer is made of it."""


@dataclass(frozen=True, eq=False)
class FoundSegment:
    """An archived file that a snapshot names, with its footer."""

    run_id: str
    attempt: int
    file: ArchivedFile
    footer: Footer


class ArchiveReader:
    """Reads files; footers, which never change, are kept in memory."""

    def __init__(self, files: ArchiveFiles | None) -> None:
        self._files = files
        self._footers: LRUCache[str, Footer] = LRUCache(_KEPT_BYTES, getsizeof=lambda footer: footer.memory_bytes)
        self._lock = Lock()

    def find_segments(self, connection: Connection, level: int, chunks: Chunks) -> list[FoundSegment]:
        """Files at a level (`model_level`: of the model) that hold some of these chunks."""
        runs = sorted({run_id for run_id, _ in chunks})
        rows = connection.execute(_segments_of_runs(), {"run_ids": runs, "level": level}).all()
        held = []
        for row in rows:
            file_of(row)
            numbers = chunks.get((row.run_id, row.attempt), ())
            if any(row.first_chunk <= number <= row.last_chunk for number in numbers):
                held.append(row)
        footers = self._footers_of(connection, [row.path for row in held])
        return [FoundSegment(row.run_id, row.attempt, file_of(row), footers[row.path]) for row in held]

    def _footers_of(self, connection: Connection, paths: Sequence[str]) -> dict[str, Footer]:
        with self._lock:
            found = {path: footer for path in paths if (footer := self._footers.get(path)) is not None}
        unknown = [path for path in paths if path not in found]
        if unknown:
            table = schema.segment
            statement = select(table).where(table.c.path.in_(unknown))
            for row in connection.execute(statement.execution_options(blobs=True)):
                hold(Footer.bytes_of(row.footer))
                found[row.path] = footer = footer_of(row)
                with self._lock:
                    if footer.memory_bytes <= _KEPT_BYTES:
                        self._footers[row.path] = footer
        return found

    def read(self, file: ArchivedFile, what: str, of: Callable[[pyarrow.NativeFile], _Found]) -> _Found:
        """What `of` reads out of a file; what: the content that it is asked for.

        Raises:
            Damaged: the file is missing or damaged, and no good copy is known.
            Busy: the archive does not answer, or this server has none.
        """
        if self._files is None:
            raise Busy(
                f"older points lie in archived files ({file.path}), and this server knows no archive; start it "
                "with the COLLAGE_SERVER_ARCHIVE that it had",
                retry_after_seconds=_RETRY_SECONDS,
            )
        try:
            return self._files.read(file, of)
        except DamagedFile as error:
            raise damaged_file(file, what) from error

    def read_into(
        self,
        values: FloatArray,
        segments: Sequence[FoundSegment],
        points: PointRows,
        keys: Sequence[str],
        positions: Mapping[str, IntArray],
    ) -> None:
        """Put totals into `values` [keys, points, layers] of the layers at these positions by run."""
        targets = dict(zip(keys, values, strict=True))
        for segment in segments:
            self._read(segment, points, positions[segment.run_id], targets)

    def read_model_into(
        self,
        values: FloatArray,
        segments: Sequence[FoundSegment],
        points: PointRows,
        keys: Sequence[str],
        rank: int,
    ) -> None:
        """Put totals of the model into `values` [keys, points]: those of one rank, or of all together."""
        targets = {key: row[:, np.newaxis] for key, row in zip(keys, values, strict=True)}
        for segment in segments:
            if rank in segment.footer.contents.ranks:
                place = np.array([segment.footer.contents.ranks.index(rank)], dtype=np.int64)
                self._read(segment, points, place, targets)

    def _read(
        self, segment: FoundSegment, points: PointRows, layers: IntArray, targets: Mapping[str, FloatArray]
    ) -> None:
        rows = list(_rows(segment, points))
        if rows:
            first = min(int(points.first_steps[some.target]) for some in rows)
            last = max(int(points.steps[some.target + some.points - 1]) for some in rows)

            def copy(source: pyarrow.NativeFile) -> None:
                read_layers(source, segment.footer, layers, rows, targets)

            self.read(segment.file, f"steps {first} to {last}", copy)

    def logged(
        self, connection: Connection, run_ids: Sequence[str], is_wanted: Callable[[str, LoggedSeries], bool]
    ) -> Iterator[tuple[str, LoggedSeries, FloatArray]]:
        """Archived values, [3][values] steps, times, values, of the series of each run that are wanted.

        For each stream and name, values of older files come first.
        """
        rows = connection.execute(_segments_of_runs(), {"run_ids": list(run_ids), "level": LOGGED}).all()
        footers = self._footers_of(connection, [row.path for row in rows])
        for row in rows:
            wanted = {series for series in footers[row.path].contents.series if is_wanted(row.run_id, series)}
            if wanted:
                hold(_LOGGED_BYTES * sum(series.values for series in wanted))
                footer, names = footers[row.path], sorted({series.name for series in wanted})

                def read(
                    source: pyarrow.NativeFile, footer: Footer = footer, wanted: set[LoggedSeries] = wanted
                ) -> list[tuple[LoggedSeries, FloatArray]]:
                    return list(read_logged(source, footer, wanted))

                for series, table in self.read(file_of(row), f"what attempt {row.attempt} logged as {names}", read):
                    yield row.run_id, series, table

    def last_logged(
        self, connection: Connection, run_id: str, stream_id: str, names: Collection[str], before: int
    ) -> dict[str, tuple[int, float]]:
        """The last step and value of each name in a stream's files before a step."""

        def is_wanted(_: str, series: LoggedSeries) -> bool:
            return series.stream_id == stream_id and series.name in names

        found: dict[str, tuple[int, float]] = {}
        for _, series, table in self.logged(connection, [run_id], is_wanted):
            steps = np.where(table[0] < before, table[0], -1)
            place = int(np.argmax(steps))
            if steps[place] >= found.get(series.name, (0,))[0]:
                found[series.name] = (int(steps[place]), float(table[2][place]))
        return found


@cache
def _segments_of_runs() -> Select[Any]:
    """Files of some runs at a level, oldest chunks first."""
    table = schema.segment
    columns = (table.c[name] for name in (*FILE_COLUMNS, "checks"))
    chosen = select(*columns).where(among(table.c.run_id), table.c.level == bindparam("level"))
    return chosen.order_by(table.c.run_id, table.c.attempt, table.c.first_chunk)


def uncovered(chunks: Chunks, points: PointRows, segments: Sequence[FoundSegment]) -> Chunks:
    """Chunks with a part that is in none of the files, whose rest in the database must be read, too."""
    covered = {
        (segment.run_id, segment.attempt, part.chunk, part.part)
        for segment in segments
        for part in segment.footer.contents.parts
    }
    left: dict[tuple[str, int], set[int]] = defaultdict(set)
    for run_id, attempt, chunk, part in points.where:
        if (run_id, attempt, chunk, part) not in covered:
            left[run_id, attempt].add(chunk)
    return {owner: [chunk for chunk in numbers if chunk in left[owner]] for owner, numbers in chunks.items()}


def _rows(segment: FoundSegment, points: PointRows) -> Iterator[Rows]:
    """Where the parts that are asked for stand; those that follow on each other in both are one."""
    start = count = row = 0
    for part, first in segment.footer.contents.places():
        place = points.where.get((segment.run_id, segment.attempt, part.chunk, part.part))
        if place is None:
            continue
        if count and place == start + count and first == row + count:
            count += part.points
            continue
        if count:
            yield Rows(start, row, count)
        start, count, row = place, part.points, first
    if count:
        yield Rows(start, row, count)
