"""Finished runs of a project as a Delta table, which other engines read: `archive publish`.

The table lies in the project's folder of the archive. Its log names the archived files as they are. Only files that
a newer attempt hides in part are copied, with their visible points, and files of which reports came late, with
these merged. Beside the log `runs.parquet` has one row a run. Both follow from the database: where the log was
deleted, the next call makes it again.

Every visible measured step of a run stands in one row a layer: an engine needs no filter. Needs deltalake.

`archiver.py` and `archive publish` call it (`tests/server/test_publishing.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from collage_monitor.backoff import Backoff
from collage_server.errors import Busy, DamagedFile, StoreUnusable
from collage_server.store import (
    COPY,
    ROW_COLUMNS,
    ArchiveFiles,
    FinishedRun,
    Footer,
    LatePoints,
    Points,
    Selection,
    Store,
    VisiblePart,
    archived_path,
    copy_points,
    project_folder,
    write_points,
)

__all__ = ["Published", "publish"]

_LOG: Final = logging.getLogger(__name__)
_PARTITIONS: Final = {"run": pa.string(), "attempt": pa.int32(), "level": pa.int32()}
_NO_COLUMN: Final = re.compile(r"[ ,;{}()\n\t=]")
"""Delta takes no such characters in names: extremes of coarse points ("minimum METRIC") stay out of the table."""
_CONFIGURATION: Final = {"delta.deletedFileRetentionDuration": "interval 36500 days"}
"""The files are the archive's: VACUUM of another engine must not take those that the log does not name (yet)."""
_ROOT: Final = "variance_product_root/"
"""Begins what follows from a point's other totals."""
_READ_BYTES: Final = 2**24
"""Of totals of layers that are merged at a time."""
_BOUNDED: Final = ("layer", "first_step", "step")
_GRACE_SECONDS: Final = 3600.0
"""Longer than it takes from a copy to the log that names it."""
_RETRY_SECONDS: Final = 10
_RETRIES: Final = 8
_RUNS: Final = pa.schema(
    [
        *(
            pa.field(name, pa.string())
            for name in ("run", "name", "project", "group", "state", "strategy", "dtype")
        ),
        *(pa.field(name, pa.int64()) for name in ("seed", "elements", "layers", "last_step")),
        pa.field("health", pa.string()),
        pa.field("findings", pa.string()),
        pa.field("config", pa.string()),
        *(pa.field(name, pa.timestamp("us", tz="UTC")) for name in ("created_at", "finished_at")),
    ]
)


@dataclass(frozen=True)
class Published:
    """The effect of a call on a project's table: its runs, and the numbers of files in all, added to the log, and
    removed from it."""

    project: str
    table: str
    runs: int
    files: int
    added: int
    removed: int


@dataclass(frozen=True)
class _Entry:
    """A file for the log to name, by its path below the project's folder."""

    run_id: str
    part: VisiblePart
    path: str


def publish(store: Store, project: str) -> Published:
    """Bring a project's table up to date: add new runs, remove deleted ones. A second call changes nothing.

    If two publish at once, the second one notices, and starts again from the first one's result.

    Raises:
        StoreUnusable: the store has no archive.
        Busy: the archive does not answer, or others go on changing the table.
    """
    if store.archiving is None:
        raise StoreUnusable("nothing is archived here: set COLLAGE_SERVER_ARCHIVE to the server's folder or bucket")
    files = store.archiving.files
    address = f"{files.address}/{project_folder(project)}"
    backoff = Backoff(0.1, 2.0)
    for last in (*[False] * _RETRIES, True):
        try:
            return _publish(store, files, project, address)
        except CommitFailedError as error:
            if last:
                raise Busy(
                    f"the table {address} was changed by other processes again and again: publish again",
                    retry_after_seconds=_RETRY_SECONDS,
                ) from error
            time.sleep(backoff.pause())
        except (DeltaError, OSError) as error:
            raise Busy(
                f"the table {address} cannot be read or written: {error}", retry_after_seconds=_RETRY_SECONDS
            ) from error
    raise AssertionError("the last try returns or raises")


def _publish(store: Store, files: ArchiveFiles, project: str, address: str) -> Published:
    folder = project_folder(project)
    options = dict(files.options)
    table = DeltaTable(address, storage_options=options) if DeltaTable.is_deltatable(address, options) else None
    named = _named(table)
    runs = [run for run in store.finished.of(project) if _is_whole(run, files, folder, named)]
    wanted = {entry.path: entry for run in runs for entry in _entries(run, folder)}
    new = [entry for path, entry in wanted.items() if path not in named]
    gone = sorted(named - wanted.keys())
    added, columns = _add_actions(store, files, folder, new)
    if added or gone:
        # A reader between the two finds the run of every layer: of those that come, and of those that go.
        _write_runs(files, folder, runs, leaving={path.partition("=")[2].partition("/")[0] for path in gone})
    if table is None and added:
        try:
            _create(address, project, added, columns, options)
        except DeltaError as error:
            if DeltaTable.is_deltatable(address, options):
                raise CommitFailedError("another process has made the table meanwhile") from error
            raise
    elif table is not None and (added or gone):
        _change(table, added, gone, columns)
    unnamed = {f"{folder}/{path}" for path in gone if _is_copy(path)} | _left_copies(files, project, folder, wanted)
    files.delete(unnamed)
    if gone or (table is not None and not added):
        _write_runs(files, folder, runs)
    return Published(project, address, len(runs), len(wanted), len(added), len(gone))


def _entries(run: FinishedRun, folder: str) -> Iterator[_Entry]:
    for part in run.files:
        path = part.file.path
        if part.chunks is not None:
            # The same name for the same points: a call that was killed, or a log made again, finds them again.
            late = "" if part.late is None else tuple(part.late)
            text = f"{path} {part.chunks} {part.before}{late}".encode()
            name = f"{COPY}{hashlib.blake2b(text, digest_size=16).hexdigest()}.parquet"
            path = archived_path(run.record.project, run.record.run_id, part.attempt, part.level, name)
        yield _Entry(run.record.run_id, part, path.removeprefix(f"{folder}/"))


def _is_whole(run: FinishedRun, files: ArchiveFiles, folder: str, named: Collection[str]) -> bool:
    """Whether all files of a run that the log does not name yet are as they were written, or could be healed."""
    for entry in _entries(run, folder):
        file = entry.part.file
        if entry.path not in named and files.examine(file) is not None:
            problem = files.heal(file)
            if problem is not None:
                _LOG.error("run %s is not published: its file %s %s", entry.run_id, file.path, problem)
                return False
    return True


def _is_copy(path: str) -> bool:
    return path.rpartition("/")[2].startswith(COPY)


def _left_copies(files: ArchiveFiles, project: str, folder: str, wanted: Collection[str]) -> set[str]:
    """Copies that a call which was killed has left behind: no log names them, and their run may be deleted."""
    before = time.time() - _GRACE_SECONDS
    held = {f"{folder}/{path}" for path in wanted}
    return {file.path for file in files.copies(project) if file.modified_at < before} - held


def _named(table: DeltaTable | None) -> set[str]:
    """Paths that the log names now."""
    if table is None:
        return set()
    return set(pa.table(table.get_add_actions()).column("path").to_pylist())


def _add_actions(
    store: Store, files: ArchiveFiles, folder: str, entries: Sequence[_Entry]
) -> tuple[list[AddAction], dict[str, None]]:
    """The log actions that add these files, and their statistics."""
    footers = store.finished.footers([entry.part.file.path for entry in entries])
    actions, columns = [], dict[str, None]()
    for entry in entries:
        footer = footers.get(entry.part.file.path)
        if footer is None:
            continue
        size, metadata = entry.part.file.size, footer.metadata
        if entry.part.chunks is not None:
            size, metadata = _copy(store, files, entry, f"{folder}/{entry.path}", footer)
        columns |= dict.fromkeys(key for key in metadata.schema.names if key not in ROW_COLUMNS)
        partitions = {"run": entry.run_id, "attempt": str(entry.part.attempt), "level": str(entry.part.level)}
        now = int(1000 * time.time())
        actions.append(AddAction(entry.path, size, partitions, now, True, json.dumps(_bounds(metadata))))
    return actions, {key: None for key in columns if not _NO_COLUMN.search(key)}


def _copy(
    store: Store, files: ArchiveFiles, entry: _Entry, path: str, footer: Footer
) -> tuple[int, pq.FileMetaData]:
    """Write the visible points of a file beside it."""
    with files.new_file() as made:
        if entry.part.late is not None:
            _write_merged(store, entry.run_id, entry.part.late, made)
        else:
            part = entry.part
            files.read(part.file, lambda source: copy_points(made, source, footer, part.chunks or (), part.before))
        size, metadata = made.stat().st_size, pq.read_metadata(made)
        files.put(made, path)
    return size, metadata


def _write_merged(store: Store, run_id: str, late: LatePoints, made: Path) -> None:
    """Write points in which late parts are merged, as in every answer."""
    with store.points.snapshot() as now:
        names = [layer.name for layer in now.layers(run_id)]
        every = Selection(first_step=late.first_step, last_step=late.last_step)
        model = now.points([run_id], None, every)[run_id]
        keys = [key for key in model.totals if not key.startswith(_ROOT)]
        width = max(_READ_BYTES // (8 * max(len(keys) * len(model.steps), 1)), 1)

        def groups() -> Iterator[Points]:
            for start in range(0, len(names), width):
                some = replace(every, by_layer=True, layers=tuple(names[start : start + width]))
                yield now.points([run_id], keys, some)[run_id]

        write_points(made, keys, groups())


def _bounds(metadata: pq.FileMetaData) -> dict[str, Any]:
    """A file's statistics as Delta keeps them: engines skip files by them."""
    names = metadata.schema.names
    low: dict[str, int] = {}
    high: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        for name in _BOUNDED:
            found = metadata.row_group(group).column(names.index(name)).statistics
            if found is not None and found.has_min_max:
                low[name] = min(found.min, low.get(name, found.min))
                high[name] = max(found.max, high.get(name, found.max))
    return {
        "numRecords": metadata.num_rows,
        "minValues": low,
        "maxValues": high,
        "nullCount": dict.fromkeys(low, 0),
    }


def _schema(columns: Collection[str]) -> Schema:
    fields = [*_PARTITIONS.items(), *ROW_COLUMNS.items(), *((key, pa.float64()) for key in columns)]
    return Schema.from_arrow(pa.schema(fields))


def _create(
    address: str, project: str, added: list[AddAction], columns: Collection[str], options: dict[str, str]
) -> None:
    create_table_with_add_actions(
        address,
        _schema(columns),
        added,
        partition_by=list(_PARTITIONS),
        name="layers",
        description=f"Layers of finished runs of {project}. The files are an archive's: never VACUUM or OPTIMIZE.",
        configuration=_CONFIGURATION,
        storage_options=options,
    )


def _change(table: DeltaTable, added: list[AddAction], gone: list[str], columns: Collection[str]) -> None:
    known = [field.name for field in table.schema().fields]
    lacking = [key for key in columns if key not in known]
    if lacking:
        fields = {field.name: field for field in _schema(lacking).fields}
        table.alter.add_columns([fields[key] for key in lacking])
    now = int(1000 * time.time())
    removed = [RemoveAction(path, True, now) for path in gone]
    # Delta takes both in one commit: no reader sees a run without a file, or in two.
    table.create_write_transaction([*removed, *added], "append", table.schema(), partition_by=list(_PARTITIONS))


def _write_runs(
    files: ArchiveFiles, folder: str, runs: Sequence[FinishedRun], leaving: Collection[str] = ()
) -> None:
    """One row a run, in place of the file that was there; the rows of `leaving` runs stay as they were."""
    rows, path = [_row(run) for run in runs], f"{folder}/runs.parquet"
    if leaving:
        known = {row["run"] for row in rows}
        with suppress(FileNotFoundError, DamagedFile), files.whole(path) as there:
            old = pq.read_table(there, schema=_RUNS).to_pylist()
            rows += [row for row in old if row["run"] in leaving and row["run"] not in known]
    table = pa.Table.from_pylist(rows, schema=_RUNS)
    with files.new_file() as made:
        pq.write_table(table, made, compression="zstd", write_page_checksum=True)
        files.put(made, path)


def _row(run: FinishedRun) -> Mapping[str, Any]:
    record = run.record
    return {
        "run": record.run_id,
        "name": record.name,
        "project": record.project,
        "group": record.group,
        "state": record.state,
        "strategy": record.strategy,
        "dtype": record.dtype,
        "seed": record.seed,
        "elements": run.elements,
        "layers": run.layers,
        "last_step": record.last_step,
        "health": run.health,
        "findings": json.dumps(run.findings, sort_keys=True),
        "config": json.dumps(record.config, sort_keys=True),
        "created_at": datetime.fromtimestamp(record.created_at, UTC),
        "finished_at": datetime.fromtimestamp(record.updated_at, UTC),
    }
