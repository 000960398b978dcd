"""Back-up and restore of an SQLite store while the server serves: one compact file, and archived files beside.

Archived files never change: those of all back-ups in a folder stand once in its `archive`, under their own names.
Each copy is read as a whole at each back-up and compared with the digest that the database has of the file.

The newest back-up is noted beside the database (`newest_backup`): the server tells its age, and heals damaged files
from its copies.

`command/backup.py` calls it. A back-up opens on a server of the same or a
later version (`tests/server/life/test_backup.py`; archived files: `tests/server/store/test_archive_faults.py`).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from collage_server.errors import DamagedFile, StoreUnusable
from collage_server.store.archive.archived_file import ArchivedFile
from collage_server.store.archive.paths import place_in
from collage_server.store.engine.database_files import sync
from collage_server.store.migrate import check_revision

__all__ = ["Backup", "NewestBackup", "back_up", "newest_backup", "restore", "verify_backup"]

_ARCHIVE: Final = "archive"
"""The folder beside back-ups that holds their archived files."""
_NOTE: Final = "newest-backup.json"
"""Beside the database: the newest back-up of it."""
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


class NewestBackup(NamedTuple):
    """When the newest back-up of a database was made (Unix seconds), its file, and the folder of archived files."""

    made_at: float
    file: str
    archive: str


def newest_backup(data: Path) -> NewestBackup | None:
    """The newest back-up of the database in a data folder, as `back_up` noted it; None if none is known."""
    try:
        return msgspec.json.decode((data / _NOTE).read_bytes(), type=NewestBackup)
    except (OSError, msgspec.MsgspecError):
        return None


class _NamedFile(NamedTuple):
    """An archived file that a database names; `problem`: what was wrong with it when it was last verified."""

    file: ArchivedFile
    run_id: str
    problem: str | None

    @property
    def path(self) -> str:
        """Its path in the archive."""
        return self.file.path

    def is_in(self, folder: Path) -> bool:
        """Whether a folder has the file as it was written; all of it is read."""
        return self.file.problem_of(place_in(folder, self.path)) is None

    def seems_lost(self, folder: Path) -> bool:
        """Whether the server's own is missing, of another size, or was damaged when it was last verified."""
        try:
            return self.problem is not None or place_in(folder, self.path).stat().st_size != self.file.size
        except FileNotFoundError:
            return True


def back_up(database: Path, target: Path, *, archive: Path | None = None, timeout_seconds: float = 30.0) -> Backup:
    """Copy the database as it stands at one moment; all that was acknowledged before the call is in it.

    Files of the folder `archive` that it names are copied, too, unless they are in `archive` beside the target
    already; of a bucket (None) none are. A copy that differs from what was written is made again.

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
            copied = _copy_files(files, archive, target.parent / _ARCHIVE, _TO_BACK_UP)
            damaged = tuple(file.path for file in files if file.seems_lost(archive))
            found = replace(found, copied_files=copied, damaged_files=damaged)
    _note(database.parent, target)
    return found


def verify_backup(file: Path, *, with_archive: bool) -> Backup:
    """Read a back-up as a whole, and with it the archived files that it names, in `archive` beside it.

    Raises:
        StoreUnusable: the back-up is not whole, or an archived file is missing or damaged.
    """
    found, files = read_backup(file), _archived_files(file)
    lost = [entry for entry in files if not entry.is_in(file.parent / _ARCHIVE)] if with_archive else []
    if lost:
        raise _damaged_error(lost[0], file.parent / _ARCHIVE, _TO_RESTORE, others=len(lost) - 1)
    return replace(found, archived_files=len(files))


def _note(data: Path, target: Path) -> None:
    """Note the back-up beside the database; one that could not be noted is good nevertheless."""
    made = NewestBackup(time.time(), str(target.absolute()), str((target.parent / _ARCHIVE).absolute()))
    with suppress(StoreUnusable), _temporary_name(data / _NOTE) as part:
        part.write_bytes(msgspec.json.encode(made))


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


def restore(file: Path, database: Path, *, archive: Path | None = None, dry_run: bool = False) -> Backup:
    """Put a back-up in place; the next server that starts there migrates and serves it.

    dry_run: only say whether it would work, and how many archived files would be copied; nothing is written.

    Archived files that it names go to the folder `archive`, from the one beside the back-up, unless they are there
    already; those in a bucket (None) are left where they are.

    Each run that was going on when it was made gets an event: nothing else shows the gap.

    Raises:
        StoreUnusable: the back-up is not whole, an archived file is missing or damaged, or a database is there
            already.
    """
    found, files = read_backup(file), _archived_files(file)
    for neighbour in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm", "-journal"))):
        _require_free(neighbour)
    copied = 0
    if archive is not None:
        copied = _copy_files(files, file.parent / _ARCHIVE, archive, _TO_RESTORE, dry_run=dry_run)
    if not dry_run:
        database.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_name(database) as part:
            shutil.copyfile(file, part)
            _mark_as_restored(part, datetime.fromtimestamp(file.stat().st_mtime, UTC), time.time())
    return replace(found, archived_files=len(files), copied_files=copied)


@contextmanager
def _reading(database: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        yield connection


def _archived_files(database: Path) -> list[_NamedFile]:
    """Files that a copy of a database names.

    Raises:
        StoreUnusable: a path leads out of the archive.
    """
    with _reading(database) as connection:
        known = {row[1] for row in connection.execute("PRAGMA table_info(segment)")}
        # A back-up of before there were digests.
        lacking = ("NULL" if name not in known else name for name in ("digest", "problem"))
        columns = ", ".join(("path", "bytes", "run_id", *lacking))
        rows = connection.execute(f"SELECT {columns} FROM segment ORDER BY path").fetchall()
    for path, *_ in rows:
        try:
            place_in(Path(), path)
        except DamagedFile as error:
            message = f"{database} names the file {path}, outside the archive; take another back-up"
            raise StoreUnusable(message) from error
    return [
        _NamedFile(ArchivedFile(path, size, digest), run_id, problem)
        for path, size, run_id, digest, problem in rows
    ]


def _copy_files(
    files: Sequence[_NamedFile], source: Path, target: Path, cure: str, *, dry_run: bool = False
) -> int:
    """Copy those files that the target does not have as they were written; how many."""
    lacking = [file for file in files if not file.is_in(target)]
    lost = [file for file in lacking if not file.is_in(source)]
    if lost:
        raise _damaged_error(lost[0], source, cure, others=len(lost) - 1)
    for file in lacking if not dry_run else ():
        place = place_in(target, file.path)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _temporary_name(place) as part:
            shutil.copyfile(place_in(source, file.path), part)
            if file.file.problem_of(part) is not None:
                raise _damaged_error(file, source, cure)
    return len(lacking)


def _damaged_error(file: _NamedFile, source: Path, cure: str, others: int = 0) -> StoreUnusable:
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
