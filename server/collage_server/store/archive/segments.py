"""The rows of archived files, written and removed with the chunks that they replace; and the owner of the archive.

A mark in the archive ties it to one database: a server on another database would remove these files, because none
of its rows names them.

Which file holds which chunk is fixed in these rows alone; paths are only names
(`tests/server/store/test_archive_faults.py`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from collage_server.errors import StoreUnusable
from collage_server.store import schema
from collage_server.store.archive.file_storage import ArchiveFiles
from collage_server.store.archive.paths import MARK
from collage_server.store.engine.database import Database
from collage_server.store.server_tables import lease

__all__ = [
    "LOGGED",
    "Segment",
    "add_segment",
    "archived_bytes",
    "model_level",
    "remove_segments",
    "require_own_archive",
]

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
    path: str
    size: int
    footer: bytes


def add_segment(connection: Connection, segment: Segment, *, has_rows: bool = True) -> None:
    """Name a file that is there: from this transaction's end on it is read."""
    values = asdict(segment)
    size = values.pop("size")
    connection.execute(insert(schema.segment).values(**values, bytes=size, has_rows=has_rows))


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
