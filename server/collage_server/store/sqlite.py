"""SQLite: one file, one writer, durable commits.

It only says how SQLite differs from `engine.Database`: one file, its lock, its space. The same contract suite runs
on both databases (`tests/server/store/contract.py`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, FromClause, create_engine, event
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler

from collage_server.errors import StoreUnusable
from collage_server.store.archive.file_storage import ArchiveFiles
from collage_server.store.backup import newest_backup
from collage_server.store.chunks.blobs import BLOBS_OPENED
from collage_server.store.database_check import DatabaseCheck, check_database
from collage_server.store.engine.database import POOL, driver_cursor
from collage_server.store.engine.database_files import (
    Ballast,
    checkpoint_log,
    file_identity,
    folder_lock,
    log_bytes,
    make_private,
    network_file_system,
    return_pages,
    sqlite_sizes,
)
from collage_server.store.migrate import migrate
from collage_server.store.records import Sizes
from collage_server.store.sealing.seal_plan import SealLimits
from collage_server.store.store import Store

__all__ = ["SqliteStore"]

_PAGE_BYTES: Final = 16384
_INCREMENTAL: Final = 2
_MAPPED_BYTES: Final = 2**31 - 2**16
"""As much of the file as SQLite can map: readers then take pages from the system's cache without a copy."""
_LOG_BYTES: Final = 16 * 2**20
"""What the write-ahead log keeps of the disk: SQLite's own measure of when to begin it again, 1,000 pages."""
_LONG_LOG_BYTES: Final = 64 * 2**20
"""Readers without a pause let the log grow beyond what it keeps; from here on writers wait until it is emptied."""
_MOST_BLOBS_OPENED: Final = 4096
"""By one connection, before another takes its place."""
_CURSORS: Final = "cursors"
"""Where a connection's `info` holds those of its statements that are still in use."""
_PRAGMAS: Final = (
    # Debian's SQLite overwrites deleted data with zeros, which writes each journal row and chunk twice.
    "secure_delete = OFF",
    "synchronous = FULL",
    "foreign_keys = ON",
    "temp_store = MEMORY",
    f"mmap_size = {_MAPPED_BYTES}",
    f"journal_size_limit = {_LOG_BYTES}",
)


class SqliteStore(Store):
    """A store in `path`; several reader connections, and one writer at a time.

    `unsafe` uses a file on a network file system, too. `ballast_bytes` are held for what frees space when the
    disk is full.
    """

    def __init__(
        self,
        path: Path,
        *,
        stale_after_seconds: float,
        busy_timeout_seconds: float = 30.0,
        limits: SealLimits | None = None,
        unsafe: bool = False,
        archive: ArchiveFiles | None = None,
        ballast_bytes: int = 0,
    ) -> None:
        super().__init__(stale_after_seconds, limits or SealLimits(), archive)
        self.path = path
        self._unsafe = unsafe
        self._ballast = Ballast(path.with_name(f"{path.name}-ballast"), ballast_bytes)
        self._busy_timeout_seconds = busy_timeout_seconds
        self._write_lock = Lock()
        self._longest_log = _LONG_LOG_BYTES
        self._identity: tuple[int, int] | None = None
        self._mark = path.with_name(f"{path.name}-was-here")

    def _connect(self) -> Engine:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._check_disk()
            # Without room SQLite cannot even open a file that is there.
            self._ballast.release()
            self._refuse_to_begin_anew()
            make_private(self.path)
            _prepare(self.path, self._busy_timeout_seconds)
            self._identity = file_identity(self.path)
            self._ballast.keep()
        except (sqlite3.Error, OSError) as error:
            raise StoreUnusable(f"{self.path} cannot be opened as a database: {error}") from error
        # Do not create it: SQLite would apply the old log to an empty file.
        query = {"mode": "rw", "uri": "true"}
        engine = create_engine(
            URL.create("sqlite", database=self.path.absolute().as_uri(), query=query),
            **POOL,
            connect_args={"timeout": self._busy_timeout_seconds, "check_same_thread": False},
        )
        engine.dialect.statement_compiler = _HintingCompiler
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
        event.listen(engine, "after_cursor_execute", _on_execute)
        event.listen(engine, "checkin", _on_checkin)
        return engine

    def _check_disk(self) -> None:
        """A write-ahead log needs memory that all its processes share, and locks and synchronisation that hold."""
        kind = network_file_system(self.path.parent)
        if kind is not None and not self._unsafe:
            raise StoreUnusable(
                f"{self.path} lies on a network file system ({kind}), where SQLite may lose what this server has "
                "acknowledged; name a folder on a local disk with --dir, or a PostgreSQL with --database, or set "
                "COLLAGE_SERVER_UNSAFE_DATABASE=1 to accept that"
            )

    def _refuse_to_begin_anew(self) -> None:
        """Where a database was, an empty one would look as if nothing had ever been stored.

        Data that is only in the write-ahead log would be lost with it: a young database would then be empty.
        """
        if self._mark.exists() and _is_empty(self.path, self._busy_timeout_seconds):
            raise StoreUnusable(
                f"{self.path} holds no tables, though a database was here: its file, or its write-ahead log "
                f"{self.path.name}-wal, is gone. Put them back, or restore a back-up: `collage-monitor backup "
                f"restore`. To begin with an empty database remove {self._mark}"
            )

    def _prepare_schema(self) -> None:
        with self.writing() as connection:
            migrate(connection)
        if not self._mark.exists():
            self._mark.touch(mode=0o600)

    @contextmanager
    def _begin_reading(self) -> Iterator[Connection]:
        with self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _claim(self, run_id: str) -> Iterator[bool]:
        """Several servers may serve a file, one of them seals at a time."""
        with folder_lock(self.path.parent) as mine:
            yield mine

    def _require_claim(self) -> None:
        """The folder's lock lasts as long as this process holds it."""

    @contextmanager
    def _begin_writing(self) -> Iterator[Connection]:
        """This process's writers take turns: they would else poll for the file's own lock."""
        with self._write_lock, self.engine.connect() as plain:
            connection = plain.execution_options(begin="IMMEDIATE")
            with connection.begin():
                yield connection

    def sizes(self) -> Sizes:
        """How much space there is.

        Raises:
            StoreUnusable: the file is no longer where it was: what goes into it would be lost.
        """
        if not self._is_there:
            raise StoreUnusable(
                f"{self.path} is not the file that this server opened: it was moved, deleted or replaced; "
                "put it back, or start the server again"
            )
        return replace(sqlite_sizes(self.path, self._ballast.bytes), archived_bytes=self.archived_bytes())

    def make_room(self) -> None:
        """Release the ballast's space for the next operation, if the disk has less left than that."""
        self._ballast.release()

    def keep_room(self) -> None:
        """Take the ballast's space again once the disk has more."""
        if self._is_there:
            self._ballast.keep()

    def checkpoint_log(self, *, read_only: bool = False) -> None:
        """Empty the write-ahead log where readers have let it grow long.

        Beside a long reader writers would wait in vain: then it is tried again when the log is twice as long. While
        nothing may be stored, nobody waits, and the log is emptied whatever it holds.
        """
        size = log_bytes(self.path)
        if size > (0 if read_only else self._longest_log) and self._is_there:
            with self._write_lock:
                self._longest_log = _LONG_LOG_BYTES if checkpoint_log(self.path) else 2 * size

    def check_database(self, goes_on: Callable[[], bool] = lambda: True) -> DatabaseCheck:
        """Check the whole file and heal what is damaged, from the newest back-up."""
        newest = newest_backup(self.path.parent)
        return check_database(self, None if newest is None else Path(newest.file), goes_on)

    def release_space(self) -> bool:
        """Give a slice of free pages back to the disk; True if there are more."""
        with self._write_lock:
            return self._is_there and return_pages(self.path, self._busy_timeout_seconds)

    @property
    def _is_there(self) -> bool:
        """Whether the file is still the one that was opened: to keep another one beside its log would lose both."""
        return file_identity(self.path) == self._identity

    def lock_project(self, connection: Connection, project: str) -> None:
        """The file has one writer."""


class _HintingCompiler(SQLiteCompiler):
    """Writes the hints of `Select.with_hint` behind their tables, which SQLAlchemy leaves out for SQLite."""

    def get_from_hint_text(self, _table: FromClause, text: str | None) -> str | None:
        """The hint as it was given."""
        return text


def _is_empty(path: Path, timeout_seconds: float) -> bool:
    """Whether there is no database at the path, or one without a table."""
    if not path.exists():
        return True
    with closing(sqlite3.connect(path, timeout=timeout_seconds)) as connection:
        return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0)


def _prepare(path: Path, timeout_seconds: float) -> None:
    """Set what can only be set before the first table: page size and vacuum mode, then the write-ahead log."""
    with closing(sqlite3.connect(path, timeout=timeout_seconds, isolation_level=None)) as connection:
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreUnusable(
                f"{path} cannot use a write-ahead log (journal mode {mode!r}); put the folder on a local disk"
            )


_as_text: Final = partial(str, encoding="utf-8", errors="replace")
"""Of bytes. By default one damaged text would refuse all rows of a question; so the row's check finds it."""


def _on_connect(connection: Any, record: Any) -> None:
    connection.isolation_level = None
    connection.text_factory = _as_text
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").close()
    record.info[_CURSORS] = WeakSet()


def _on_execute(connection: Connection, cursor: Any, *_: Any) -> None:
    connection.info[_CURSORS].add(cursor)


def _on_checkin(_connection: Any, record: Any) -> None:
    """Close what a transaction left open, and the connection itself once it has opened many blobs.

    Rows that nobody reads to their end (an error ends the transaction, and its traceback is kept) hold SQLite's
    snapshot beyond it: the connection's next transaction would read what was there then, and could not write.

    Until its connection is closed, Python's sqlite3 keeps a reference to every blob that was ever opened. They are
    small, but between them memory that large arrays took cannot be given back: 100 MiB for an export.
    """
    for cursor in list(record.info.get(_CURSORS, ())):
        cursor.close()
    if record.info.get(BLOBS_OPENED, 0) > _MOST_BLOBS_OPENED:
        record.invalidate()


def _on_begin(connection: Connection) -> None:
    with driver_cursor(connection) as cursor:
        if not cursor.connection.in_transaction:
            cursor.execute(f"BEGIN {connection.get_execution_options().get('begin', 'DEFERRED')}")
