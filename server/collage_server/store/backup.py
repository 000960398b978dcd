"""Back-up and restore of an SQLite store while the server serves: one compact file, and archived files beside.

Archived files never change: those of all back-ups in a folder stand once in its `archive`, under their own names.
Whoever copies one reads all of it and checks its pages; a copy that is there already must have its size.

`command/backup.py` calls it. A back-up opens on a server of the same or a
later version (`tests/server/life/test_backup.py`; archived files: `tests/server/store/test_archive_faults.py`,
copied: `tests/server/life/test_large_backup.py`, by night).
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from collage_server.errors import DamagedFile, StoreUnusable
from collage_server.store.archive.parquet import check_pages
from collage_server.store.engine.database_files import sync
from collage_server.store.migrate import check_revision

__all__ = ["Backup", "back_up", "restore"]

_ARCHIVE: Final = "archive"
"""The folder beside back-ups that holds their archived files."""
_TO_BACK_UP: Final = "put it back from an older back-up, or delete the run"
_TO_RESTORE: Final = (
    "put it back from another back-up. COLLAGE_SERVER_ARCHIVE=off restores the database without any archived file"
)
"""What to do about a damaged file."""


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A back-up that was read completely and checked.

    It names `archived_files`; `copied_files` of them were not beside it, or not in place, before. The server has
    lost or damaged `damaged_files`, but their copies beside the back-up are good.
    """

    file: str
    bytes: int
    schema_revision: str
    runs: int
    archived_files: int = 0
    copied_files: int = 0
    damaged_files: tuple[str, ...] = ()


class _ArchivedFile(NamedTuple):
    """An archived file as a database describes it."""

    path: str
    run_id: str
    bytes: int

    def is_in(self, folder: Path) -> bool:
        """Whether a folder has a file of this path and size."""
        try:
            return (folder / self.path).stat().st_size == self.bytes
        except FileNotFoundError:
            return False


def back_up(database: Path, target: Path, *, archive: Path | None = None, timeout_seconds: float = 30.0) -> Backup:
    """Copy the database as it stands at one moment; all that was acknowledged before the call is in it.

    Files of the folder `archive` that it names are copied, too, unless they are in `archive` beside the target
    already; of a bucket (None) none are. A copy of another size is made again.

    Readers and writers go on meanwhile; only the write-ahead log grows until the copy is made. `target` stands
    under its name when it is whole, checked and on the disk.

    Raises:
        StoreUnusable: no database, the target exists, the copy cannot be made or read, or an archived file is
            missing or damaged and has no good copy.
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
        files = _archived_files(part)
        found = replace(found, file=str(target), archived_files=len(files))
        if archive is not None:
            copied = _copy_files(part, files, archive, target.parent / _ARCHIVE, _TO_BACK_UP)
            damaged = tuple(file.path for file in files if not file.is_in(archive))
            found = replace(found, copied_files=copied, damaged_files=damaged)
    return found


def read_backup(file: Path) -> Backup:
    """Read a whole back-up.

    Raises:
        StoreUnusable: damaged, not a database of this program, or of a newer one.
    """
    try:
        with _reading(file) as connection:
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
        StoreUnusable: the back-up is not whole, an archived file is missing or damaged, or a database is there
            already.
    """
    found, files = read_backup(file), _archived_files(file)
    database.parent.mkdir(parents=True, exist_ok=True)
    for neighbour in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm", "-journal"))):
        _require_free(neighbour)
    copied = 0
    if archive is not None:
        copied = _copy_files(file, files, file.parent / _ARCHIVE, archive, _TO_RESTORE)
    with _temporary_name(database) as part:
        shutil.copyfile(file, part)
        _mark_as_restored(part, datetime.fromtimestamp(file.stat().st_mtime, UTC), time.time())
    return replace(found, archived_files=len(files), copied_files=copied)


@contextmanager
def _reading(database: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        yield connection


def _archived_files(database: Path) -> list[_ArchivedFile]:
    """Files that a copy of a database names.

    Raises:
        StoreUnusable: a path leads out of the archive.
    """
    with _reading(database) as connection:
        rows = connection.execute("SELECT path, run_id, bytes FROM segment ORDER BY path").fetchall()
    files = list(itertools.starmap(_ArchivedFile, rows))
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts:
            raise StoreUnusable(f"{database} names the file {file.path}, outside the archive; take another back-up")
    return files


def _copy_files(database: Path, files: Sequence[_ArchivedFile], source: Path, target: Path, cure: str) -> int:
    """Copy those files that the target does not have in their size; how many."""
    lacking = [file for file in files if not file.is_in(target)]
    lost = [file for file in lacking if not file.is_in(source)]
    if lost:
        raise _damaged_error(lost[0], source, cure, others=len(lost) - 1)
    with _reading(database) as connection:
        for file in lacking:
            [footer] = connection.execute("SELECT footer FROM segment WHERE path = ?", (file.path,)).fetchone()
            (target / file.path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _temporary_name(target / file.path) as part:
                shutil.copyfile(source / file.path, part)
                try:
                    check_pages(part, footer)
                except DamagedFile as error:
                    raise _damaged_error(file, source, cure) from error
    return len(lacking)


def _damaged_error(file: _ArchivedFile, source: Path, cure: str, others: int = 0) -> StoreUnusable:
    more = f" ({others} more are)" if others else ""
    return StoreUnusable(
        f"the archived file {file.path} of run {file.run_id} is missing or damaged in {source}{more}: {cure}"
    )


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
        # A copy does not know whether it replaces its original in the archive.
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
