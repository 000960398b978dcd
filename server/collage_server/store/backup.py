"""Back-up and restore of an SQLite store while the server serves: one compact file, and archived files beside.

Archived files never change: those of all back-ups in a folder stand once in its `archive`, under their own names.

`command/backup.py` calls it; `archive/file_storage.py` takes `sync`. A back-up opens on a server of the same or a
later version (`tests/server/life/test_backup.py`; archived files: `tests/server/store/test_archive_faults.py`,
copied: `tests/server/life/test_large_backup.py`, by night).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from collage_server.errors import StoreUnusable
from collage_server.store.migrate import check_revision

__all__ = ["Backup", "back_up", "restore", "sync"]

_ARCHIVE: Final = "archive"
"""The folder beside back-ups that holds their archived files."""


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A back-up that was read completely and checked.

    It names `archived_files`; `copied_files` of them were not beside it, or not in place, before.
    """

    file: str
    bytes: int
    schema_revision: str
    runs: int
    archived_files: int = 0
    copied_files: int = 0


def back_up(database: Path, target: Path, *, archive: Path | None = None, timeout_seconds: float = 30.0) -> Backup:
    """Copy the database as it stands at one moment; all that was acknowledged before the call is in it.

    Files of the folder `archive` that it names are copied, too, unless they are in `archive` beside the target
    already; of a bucket (None) none are.

    Readers and writers go on meanwhile; only the write-ahead log grows until the copy is made. `target` stands
    under its name when it is whole, checked and on the disk.

    Raises:
        StoreUnusable: no database, the target exists, or the copy cannot be made or read.
    """
    if not database.exists():
        raise StoreUnusable(f"{database} does not exist; name the server's data folder with --dir")
    _require_free(target)
    with _temporary_name(target) as part:
        try:
            with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True)) as connection:
                connection.execute(f"PRAGMA busy_timeout = {int(timeout_seconds * 1000)}")
                connection.execute("VACUUM INTO ?", (str(part),))
        except sqlite3.Error as error:
            raise StoreUnusable(f"{database} cannot be copied to {target}: {error}") from error
        found = read_backup(part)
        paths = _archived_files(part)
        copied = 0 if archive is None else _copy_files(paths, archive, target.parent / _ARCHIVE)
    return replace(found, file=str(target), archived_files=len(paths), copied_files=copied)


def read_backup(file: Path) -> Backup:
    """Read a whole back-up.

    Raises:
        StoreUnusable: damaged, not a database of this program, or of a newer one.
    """
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            problem = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if problem != "ok":
                raise StoreUnusable(f"{file} is damaged ({problem}); take another back-up")
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            runs = connection.execute("SELECT count(*) FROM run").fetchone()[0]
    except sqlite3.Error as error:
        raise StoreUnusable(f"{file} is no back-up of a Collage Monitor database: {error}") from error
    if revision is None:
        raise StoreUnusable(f"{file} is no back-up of a Collage Monitor database: it has no schema revision")
    check_revision(revision[0], str(file))
    return Backup(file=str(file), bytes=file.stat().st_size, schema_revision=revision[0], runs=runs)


def restore(file: Path, database: Path, *, archive: Path | None = None) -> Backup:
    """Put a back-up in place; the next server that starts there migrates and serves it.

    Archived files that it names go to the folder `archive`, from the one beside the back-up, unless they are there
    already; those in a bucket (None) are left where they are.

    Each run that was going on when it was made gets an event: nothing else shows the gap.

    Raises:
        StoreUnusable: the back-up is not whole, an archived file is missing, or a database is there already.
    """
    found, paths = read_backup(file), _archived_files(file)
    database.parent.mkdir(parents=True, exist_ok=True)
    for neighbour in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm", "-journal"))):
        _require_free(neighbour)
    copied = 0 if archive is None else _copy_files(paths, file.parent / _ARCHIVE, archive)
    with _temporary_name(database) as part:
        shutil.copyfile(file, part)
        _mark_as_restored(part, datetime.fromtimestamp(file.stat().st_mtime, UTC), time.time())
    return replace(found, archived_files=len(paths), copied_files=copied)


def _archived_files(database: Path) -> list[str]:
    """Paths that a copy of a database names; a database of before there were any names none."""
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'segment'").fetchone() is None:
            return []
        return [path for (path,) in connection.execute("SELECT path FROM segment ORDER BY path")]


def _copy_files(paths: list[str], source: Path, target: Path) -> int:
    """Copy those files that the target does not have; how many."""
    lacking = [path for path in paths if not (target / path).exists()]
    missing = [path for path in lacking if not (source / path).exists()]
    if missing:
        raise StoreUnusable(
            f"{len(missing)} archived files are not in {source}, the first is {missing[0]}: put them back there"
        )
    for path in lacking:
        (target / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _temporary_name(target / path) as part:
            shutil.copyfile(source / path, part)
    return len(lacking)


def _mark_as_restored(database: Path, made_at: datetime, now: float) -> None:
    """An event for each run that was going on, and no claim on the archive; the columns are those of every schema
    that can be restored."""
    text = (
        f"the server's data were restored from a back-up made {made_at:%Y-%m-%d %H:%M} UTC: what was reported "
        "between then and the restore is missing where its sender no longer has it"
    )
    statement = (
        "INSERT INTO event (run_id, event, origin, time, kind, text, layers) "
        "SELECT run_id, 1 + coalesce((SELECT max(event) FROM event AS e WHERE e.run_id = run.run_id), 0), "
        "?, ?, 'restored', ?, '[]' FROM run WHERE state = 'running'"
    )
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(statement, (f"restored/{now:.0f}", now, text))
        # Whether it takes its original's place in the archive is not known here.
        connection.execute("DELETE FROM lease WHERE name = 'archive'")


def _require_free(path: Path) -> None:
    if path.exists():
        raise StoreUnusable(f"{path} exists; stop what uses it and move it away first, or choose another name")


@contextmanager
def _temporary_name(target: Path) -> Iterator[Path]:
    """A temporary name beside the target; the file gets its own once its bytes and its entry are on the disk."""
    part = target.with_name(target.name + ".part")
    try:
        part.unlink(missing_ok=True)
        # For its owner alone, like the database.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        yield part
        sync(part)
        part.rename(target)
        sync(target.parent)
    except OSError as error:
        raise StoreUnusable(f"{target} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's entries, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
