"""Changes of a run: created or resumed, renamed, tagged, ended, deleted, brought back; within its project's quotas.

`run_store.py` calls it inside a transaction. Any change raises `changed_at`, by which kept answers are found out of
date.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from collage_monitor import wire
from collage_server.errors import Conflict, Gone, NotFound
from collage_server.memory_budget import held_rows
from collage_server.store import schema, server_tables
from collage_server.store.row_checks import chunk_check, damaged_rows, is_whole, update_rows
from collage_server.store.row_crc import CRC_BYTES
from collage_server.store.row_helpers import insert_into, missing_run, require_run, to_json
from collage_server.store.runs.configurations import configuration_of
from collage_server.store.runs.reported_state import LAST_SIGN_OF_LIFE

__all__ = [
    "QuotaCheck",
    "QuotaName",
    "bury_run",
    "check_quotas",
    "create_run",
    "dig_up_run",
    "forget_kept",
    "go_on",
    "note_change",
    "update_run",
]

QuotaName = Literal["runs", "tags"]
QuotaCheck = Callable[[str, QuotaName, int, Callable[[], int]], None]
"""(project, what, how many are added at most, a count of what there would be): raises where that is too many, which
undoes the change. It need not count: the more a project has, the longer that takes."""

_RUN: Final = schema.run
_TOMB: Final = schema.deleted_run
_OWNED: Final = (
    schema.entry,
    schema.numbered_export,
    schema.run_latest,
    schema.run_summary,
    schema.event,
    server_tables.incident,
    server_tables.silence,
    schema.replica_mismatch,
    schema.layer,
    schema.measured_attempt,
    schema.attempt,
    schema.run_tag,
    schema.run,
)
_ROW_BYTES: Final = 2048
"""What a row takes as objects and as msgpack, beside three times its texts and bytes."""


def check_quotas(connection: Connection, project: str, check: QuotaCheck, *, runs: int, tags: int) -> None:
    """Let `check` judge the project's counts after this transaction, which added these runs and tags.

    The caller holds the project's lock, so that no other transaction adds any meanwhile.
    """
    run, tag = schema.run, schema.run_tag
    mine = select(run.c.run_id).where(run.c.project == project)
    held: dict[QuotaName, Select[Any]] = {
        "runs": select(func.count()).select_from(run).where(run.c.project == project),
        "tags": select(func.count(tag.c.tag.distinct())).where(tag.c.run_id.in_(mine)),
    }
    added: dict[QuotaName, int] = {"runs": runs, "tags": tags}
    for what, statement in held.items():
        if added[what]:
            check(project, what, added[what], partial(_count, connection, statement))


def _count(connection: Connection, statement: Select[Any]) -> int:
    return int(connection.execute(statement).scalar_one())


def create_run(connection: Connection, project: str, create: wire.RunCreate, now: float) -> bool:
    """Insert the run, or resume the one with this id; True when it is new."""
    known = (
        connection.execute(select(_RUN).where(_RUN.c.run_id == create.run_id).with_for_update()).mappings().first()
    )
    if known is not None:
        _resume(connection, dict(known), project, create, now)
        return False
    tomb = schema.deleted_run
    buried = connection.execute(select(tomb.c.project).where(tomb.c.run_id == create.run_id)).scalar()
    if buried is not None and buried != project:
        raise _taken(create.run_id)
    missing = missing_run(connection, create.run_id)
    if not isinstance(missing, NotFound):
        raise missing
    if create.resume == "must":
        raise missing
    connection.execute(
        insert(_RUN).values(
            run_id=create.run_id,
            project=project,
            name=create.name or create.run_id,
            group=create.group,
            notes=create.notes,
            seed=create.seed,
            config=to_json(create.config),
            configuration=configuration_of(project, create.config),
            state="running",
            created_at=now,
            updated_at=now,
        )
    )
    _set_tags(connection, create.run_id, create.tags)
    return True


def _resume(
    connection: Connection, known: dict[str, Any], project: str, create: wire.RunCreate, now: float
) -> None:
    """The request's fields replace the stored ones. The run goes on with a launch that is new alone (`go_on`):
    ranks that are late, or whose reports waited on a disk, register after the others have finished."""
    if known["project"] != project:
        raise _taken(create.run_id)
    attempt = schema.attempt.c
    launched = select(attempt.attempt).where(attempt.run_id == create.run_id, attempt.attempt > 0)
    if create.resume == "never" and connection.execute(launched.limit(1)).first():
        raise Conflict(
            f"run {create.run_id!r} exists and resume is 'never'; choose another run_id or resume='allow'",
            field="resume",
        )
    stated: dict[str, Any] = {
        name: value
        for name, value in (
            ("name", create.name),
            ("group", create.group),
            ("notes", create.notes or None),
            ("seed", create.seed),
            ("config", to_json(create.config) if create.config else None),
            ("configuration", configuration_of(project, create.config) if create.config else None),
        )
        if value is not None
    }
    stated["updated_at"] = _next_sign_of_life(connection, create.run_id, now)
    update_rows(connection, _RUN, stated, _RUN.c.run_id == create.run_id)
    if create.tags:
        _set_tags(connection, create.run_id, create.tags)


def go_on(connection: Connection, run_id: str, now: float) -> None:
    """Set a run that is over running, as a launch of it begins. The caller has locked the run."""
    if connection.execute(select(_RUN.c.state).where(_RUN.c.run_id == run_id)).scalar_one() != "running":
        stated = {"state": "running", "updated_at": _next_sign_of_life(connection, run_id, now)}
        update_rows(connection, _RUN, stated, _RUN.c.run_id == run_id)


def _taken(run_id: str) -> Conflict:
    return Conflict(f"run_id {run_id!r} is taken by another project; choose another run_id", field="run_id")


def update_run(connection: Connection, run_id: str, change: wire.RunUpdate, now: float) -> None:
    """Change the stated fields, if any. A stated state is a sign of life; the others are none."""
    require_run(connection, run_id, lock=True)
    stated = {
        name: getattr(change, name)
        for name in ("state", "name", "group", "notes")
        if getattr(change, name) is not None
    }
    if change.state is not None:
        stated["updated_at"] = _next_sign_of_life(connection, run_id, now)
    if change.configuration is not None:
        stated["treated_as"] = change.configuration or None
    if stated:
        update_rows(connection, _RUN, stated, _RUN.c.run_id == run_id)
    if not stated and change.tags is None:
        return
    note_change(connection, run_id, now)
    if change.tags is not None:
        _set_tags(connection, run_id, change.tags)


def _next_sign_of_life(connection: Connection, run_id: str, now: float) -> float:
    """`now`, but later than other servers' times for the run; otherwise its cached rows would count as new."""
    known = connection.execute(select(LAST_SIGN_OF_LIFE).where(_RUN.c.run_id == run_id)).scalar_one()
    return max(now, math.nextafter(known, math.inf))


def note_change(connection: Connection, run_id: str, now: float) -> None:
    """Give the run another revision, where nothing else of it tells the change. The caller has locked the run."""
    update_rows(connection, _RUN, {"changed_at": now}, _RUN.c.run_id == run_id)


def _set_tags(connection: Connection, run_id: str, tags: Sequence[str]) -> None:
    connection.execute(delete(schema.run_tag).where(schema.run_tag.c.run_id == run_id))
    rows = [{"run_id": run_id, "tag": tag, "position": i} for i, tag in enumerate(dict.fromkeys(tags))]
    if rows:
        connection.execute(insert(schema.run_tag), rows)


def bury_run(connection: Connection, run_id: str, project: str, now: float, undo_seconds: float) -> None:
    """Put a tombstone in the place of a run's rows without journal and chunks; it keeps them for `undo_seconds`.

    The caller has locked the run.
    """
    until, kept = (now + undo_seconds, _rows_of(connection, run_id)) if undo_seconds else (None, None)
    for table in _OWNED:
        connection.execute(delete(table).where(table.c.run_id == run_id))
    tomb = {"run_id": run_id, "project": project, "deleted_at": now, "kept_until": until, "kept": kept}
    connection.execute(insert(_TOMB).values(tomb))
    if kept is None:
        _empty_streams(connection, run_id)


def dig_up_run(connection: Connection, run_id: str, now: float) -> None:
    """Put the rows of a deleted run back, as they were, under another revision; nothing where it is there.

    Raises:
        Gone: its tombstone does not keep them, or not any more.
        Damaged: what it keeps was changed on the disk.
    """
    mine = _TOMB.c.run_id == run_id
    tomb = connection.execute(select(_TOMB).where(mine).with_for_update()).first()
    if tomb is None:
        require_run(connection, run_id)
        return
    if tomb.kept is None or tomb.kept_until <= now:
        raise Gone(f"run {run_id!r} was deleted for good, nothing brings it back; start a new run", field="run_id")
    check, content = tomb.kept[:CRC_BYTES], tomb.kept[CRC_BYTES:]
    if not is_whole(check, run_id, content):
        raise damaged_rows(run_id, "what its deletion kept")
    kept = msgspec.msgpack.decode(content)
    for table in _OWNED:
        names, rows = kept[table.name]
        if rows:
            # What came meanwhile stays: the same alert of another source.
            statement = insert_into(connection, table).on_conflict_do_nothing()
            connection.execute(statement, [dict(zip(names, row, strict=True)) for row in rows])
    connection.execute(delete(_TOMB).where(mine))
    note_change(connection, run_id, now)


def forget_kept(connection: Connection, run_id: str, now: float) -> bool:
    """Keep nothing of a deleted run whose deletion can be undone no longer; False where nothing was kept."""
    over = (_TOMB.c.run_id == run_id, _TOMB.c.kept_until <= now)
    gone = connection.execute(update(_TOMB).where(*over).values(kept=None, kept_until=None)).rowcount
    if gone:
        _empty_streams(connection, run_id)
    return bool(gone)


def _rows_of(connection: Connection, run_id: str) -> bytes:
    """The rows of a run in `_OWNED`, by table, with a check before them."""
    found = {}
    for table in _OWNED:
        rows = connection.execute(select(table).where(table.c.run_id == run_id))
        found[table.name] = ([str(column.name) for column in table.c], [tuple(row) for row in _held(rows)])
    content = msgspec.msgpack.encode(found)
    return chunk_check(run_id, content) + content


def _held(rows: Any) -> Iterator[Row[Any]]:
    return held_rows(
        (row, _ROW_BYTES + 3 * sum(len(value) for value in row if isinstance(value, str | bytes))) for row in rows
    )


def _empty_streams(connection: Connection, run_id: str) -> None:
    """Leave only what answers that the run is gone."""
    emptied = {"statistics": "[]", "layers": b"", "elements": b"", "replicas": b"", "watch": None, "checks": None}
    connection.execute(update(schema.stream).where(schema.stream.c.run_id == run_id).values(**emptied))
    claim = schema.seal_claim.c.run_id
    free = select(claim).where(claim == run_id).with_for_update(skip_locked=True)
    connection.execute(delete(schema.seal_claim).where(claim.in_(free)))
