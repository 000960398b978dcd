"""The rows of archived files, written and removed with the chunks that they replace; and the owner of the archive.

A mark in the archive ties it to one database: a server on another database would remove these files, because none
of its rows names them.

Which file holds which chunk is fixed in these rows alone; paths are only names
(`tests/server/store/test_archive_faults.py`).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from collage_server.errors import Damaged, DamagedFile, StoreUnusable
from collage_server.store import schema
from collage_server.store.archive.archived_file import ArchivedFile, digest_of
from collage_server.store.archive.file_storage import ArchiveFiles
from collage_server.store.archive.parquet import Footer, check_pages
from collage_server.store.archive.paths import MARK
from collage_server.store.engine.database import Database
from collage_server.store.row_checks import chunk_check, damaged_rows, is_whole
from collage_server.store.server_tables import lease

__all__ = [
    "FILE_COLUMNS",
    "LOGGED",
    "Segment",
    "Verification",
    "Verified",
    "add_segment",
    "archived_bytes",
    "file_of",
    "footer_of",
    "model_level",
    "remove_segments",
    "require_own_archive",
]

FILE_COLUMNS: Final = ("run_id", "attempt", "level", "first_chunk", "last_chunk", "path", "bytes", "digest")
"""What a row of `segment` says of its file."""
_LOG: Final = logging.getLogger(__name__)
_LEASE: Final = "archive"
_LOOKED_AT: Final = 8

LOGGED: Final = 0
"""The `level` of a file of logged values; its chunks are the number of the file."""


def model_level(level: int) -> int:
    """The `level` of a file that holds the model's totals at this level; one of layers has the level itself."""
    return -level


@dataclass(frozen=True)
class Segment:
    """One archived file of a run: chunks `first_chunk` to `last_chunk` of an attempt at a level (`model_level`)."""

    run_id: str
    attempt: int
    level: int
    first_chunk: int
    last_chunk: int
    file: ArchivedFile
    footer: bytes


def add_segment(connection: Connection, segment: Segment, now: float, *, has_rows: bool = True) -> None:
    """Name a file that is there and was verified `now`: from this transaction's end on it is read."""
    path, size, digest = segment.file
    places = {name: getattr(segment, name) for name in ("run_id", "attempt", "level", "first_chunk", "last_chunk")}
    values = {**places, "path": path, "bytes": size, "digest": digest, "footer": segment.footer}
    values |= {"checks": _checks(values), "checked_at": now, "has_rows": has_rows}
    connection.execute(insert(schema.segment).values(**values))


def _checks(row: Mapping[str, Any]) -> bytes:
    """The checks of a row of `segment`: of what it says of the file, and of that with the footer."""
    return b"".join(
        chunk_check(*map(row.__getitem__, names)) for names in (FILE_COLUMNS, (*FILE_COLUMNS, "footer"))
    )


def file_of(row: Row[Any]) -> ArchivedFile:
    """The file of a row of `segment` with `FILE_COLUMNS` and `checks`, once they are compared.

    Raises:
        Damaged: they differ.
    """
    if not is_whole(row.checks, *(getattr(row, name) for name in FILE_COLUMNS)):
        raise damaged_rows(row.run_id, f"the row of the archived file {row.path}")
    return ArchivedFile(row.path, row.bytes, row.digest)


def footer_of(row: Row[Any]) -> Footer:
    """The footer in a whole row of `segment`, once it is compared with its check.

    Raises:
        Damaged: they differ.
    """
    file = file_of(row)
    if not is_whole(row.checks, *(getattr(row, name) for name in (*FILE_COLUMNS, "footer")), place=1):
        raise damaged_rows(row.run_id, f"the footer of the archived file {file.path}")
    return Footer.of(row.footer)


class Verified(NamedTuple):
    """A file that was read as a whole: what is wrong with it now, if anything, and whether a copy replaced it."""

    path: str
    run_id: str
    size: int
    problem: str | None
    healed: bool


class Verification:
    """Reads archived files as a whole, heals what it can, and keeps in `segment` when and with which result."""

    def __init__(self, database: Database, files: ArchiveFiles) -> None:
        self._database = database
        self._files = files

    def due(self, before: float, most: int, runs: Collection[str] = ()) -> list[Row[Any]]:
        """Rows of files that were not verified since `before`, the oldest first; of some runs, where given."""
        table = schema.segment
        chosen = select(table).where(*([table.c.run_id.in_(list(runs))] if runs else []))
        found: list[Row[Any]] = []
        with self._database.reading() as connection:
            # One after the other: together they would read the whole table instead of the index.
            for older in (table.c.checked_at.is_(None), table.c.checked_at < before):
                oldest = chosen.where(older).order_by(table.c.checked_at).limit(most - len(found))
                found += connection.execute(oldest.execution_options(blobs=True))
        return found

    def suspects(self) -> list[Row[Any]]:
        """Rows of the files that somebody could not read since they were last verified."""
        table, paths = schema.segment, list(self._files.suspects)
        with self._database.reading() as connection:
            found = connection.execute(select(table).where(table.c.path.in_(paths))).all() if paths else []
        for path in set(paths) - {row.path for row in found}:
            self._files.suspects.pop(path, None)
        return list(found)

    def problems(self) -> dict[str, str]:
        """What was wrong with files when they were last verified, by path."""
        table = schema.segment
        with self._database.reading() as connection:
            found = connection.execute(select(table.c.path, table.c.problem).where(table.c.problem.is_not(None)))
            return {row.path: row.problem for row in found}

    def verify(self, row: Row[Any], now: float) -> Verified:
        """Read a file and replace it by a good copy if it is missing or damaged.

        Raises:
            Busy: the archive does not answer.
        """
        file, healed, problem = ArchivedFile(row.path, row.bytes, row.digest), False, None
        try:
            footer_of(row)
            problem = self._files.examine(file)
            if problem is not None:
                found, problem = problem, self._files.heal(file)
                healed = problem is None
                _LOG.error("the archived file %s %s%s", row.path, found, "; it is healed" if healed else "")
        except Damaged as error:
            problem = error.message
        more: Mapping[str, Any] = {}
        if row.digest is None and problem is None:
            try:
                more = self._described(row)
            except DamagedFile as error:
                problem = error.message
        table = schema.segment
        with self._database.writing() as connection:
            kept = update(table).where(table.c.run_id == row.run_id, table.c.path == row.path)
            connection.execute(kept.values(checked_at=now, problem=problem, **more))
        self._files.suspects.pop(row.path, None)
        return Verified(row.path, row.run_id, row.bytes, problem, healed)

    def _described(self, row: Row[Any]) -> dict[str, Any]:
        """What a row lacks of a file that a server without digests made, once the file fits the row's footer."""
        with self._files.whole(row.path) as stored:
            check_pages(stored, row.footer)
            again = {**row._mapping, "digest": digest_of(stored)}
        return {"digest": again["digest"], "checks": _checks(again)}


def remove_segments(connection: Connection, run_id: str, paths: Collection[str], now: float) -> None:
    """Name these files no more: they are removed once every reader that may have seen their rows has ended."""
    table = schema.segment
    if paths:
        connection.execute(
            insert(schema.segment_gone), [{"run_id": run_id, "path": path, "gone_at": now} for path in paths]
        )
        connection.execute(delete(table).where(table.c.run_id == run_id, table.c.path.in_(list(paths))))


def archived_bytes(connection: Connection) -> int:
    """The size of all archived files."""
    return int(connection.execute(select(func.coalesce(func.sum(schema.segment.c.bytes), 0))).scalar_one())


def require_own_archive(database: Database, files: ArchiveFiles, *, to_write: bool) -> None:
    """Refuse an archive that is another database's, or that has lost its files.

    to_write: mark one that nobody has.

    Raises:
        StoreUnusable: why, and what to do.
        Busy: the archive does not answer.
    """
    own, place, named = _known(database)
    mark = files.read_mark()
    if mark is None:
        if named and not any(map(files.holds, named)):
            raise StoreUnusable(
                f"the archive {files.address} holds none of the files that this database names, such as "
                f"{named[0]}: mount the shared folder, or set COLLAGE_SERVER_ARCHIVE to where they are; files that "
                "are lost come back from a back-up"
            )
        if not to_write:
            return
        own = own or _new_id(database)
        files.write_mark(json.dumps({"archive": own, "database": place}).encode())
        mark = files.read_mark()
    if mark is None or _told(mark) != {"archive": own, "database": place}:
        raise StoreUnusable(
            f"the archive {files.address} belongs to another database: set COLLAGE_SERVER_ARCHIVE to a folder, or "
            "a bucket's folder, of this one's own. Where this database takes the other's place (restored, or moved "
            f"to another cluster), stop the other's servers for good, then delete {MARK} there"
        )


def _told(mark: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(mark)
    return None


def _known(database: Database) -> tuple[str | None, str, list[str]]:
    """The id of the database's archive, what tells the database from a copy, and some files that it names."""
    with database.reading() as connection:
        own = connection.execute(select(lease.c.holder).where(lease.c.name == _LEASE)).scalar()
        some = select(schema.segment.c.path).order_by(schema.segment.c.path).limit(_LOOKED_AT)
        return own, database.place(connection), list(connection.execute(some).scalars())


def _new_id(database: Database) -> str:
    """An id for the database's archive, or the one that another server has given it meanwhile."""
    try:
        with database.writing() as connection:
            row = {"name": _LEASE, "holder": uuid.uuid4().hex, "ends_at": 0.0}
            connection.execute(insert(lease).values(row))
    except IntegrityError:
        pass
    return str(_known(database)[0])
