"""Runs: create, resume, list, change, delete."""

from __future__ import annotations

import base64
import binascii
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from collage_monitor import wire
from collage_server.errors import Conflict, NotFound, Unprocessable
from collage_server.store import schema
from collage_server.store.access.tokens import append_to_audit_log
from collage_server.store.engine.database import Database
from collage_server.store.records import (
    RunFilter,
    RunPageRecord,
    RunQuery,
    RunRecord,
    RunRevision,
    first_hidden_steps,
)
from collage_server.store.rows import among, from_json, later, missing_run, require_run, require_runs, to_json
from collage_server.store.runs.latest import newest_scalars, sum_of_newest

__all__ = [
    "QuotaCheck",
    "QuotaName",
    "RunStore",
    "attempts_of_runs",
    "matching",
    "note_change",
    "read_page",
    "read_records",
    "read_run",
    "rows_by_run",
]

QuotaName = Literal["runs", "tags"]
QuotaCheck = Callable[[str, QuotaName, int], None]
"""(project, what, how many there would be): raises where that is too many, which undoes the change."""

_RUN: Final = schema.run
_AS_STORED: Final = [column.name for column in _RUN.c if column.name not in {"config", "updated_at"}]
_OWNED: Final = (
    schema.entry,
    schema.run_latest,
    schema.run_newest,
    schema.run_overview,
    schema.event,
    schema.incident,
    schema.silence,
    schema.replica_mismatch,
    schema.layer,
    schema.measured_attempt,
    schema.attempt,
    schema.run_tag,
    schema.run,
)


class RunStore:
    """Runs: created, listed, changed, deleted. `begin_purge` starts to remove the rows of a deleted run."""

    def __init__(self, database: Database, begin_purge: Callable[[str], None]) -> None:
        self._database = database
        self._begin_purge = begin_purge

    def create(
        self, project: str, create: wire.RunCreate, now: float, check: QuotaCheck | None = None
    ) -> tuple[RunRecord, bool]:
        """Create a run or resume it; says if it is new. `check` may refuse what the project would then hold."""
        try:
            return self._create(project, create, now, check)
        except IntegrityError:
            return self._create(project, create, now, check)

    def _create(
        self, project: str, create: wire.RunCreate, now: float, check: QuotaCheck | None
    ) -> tuple[RunRecord, bool]:
        """Once more where another process created the same run in between: it is then resumed."""
        with self._database.writing() as connection:
            if check is not None:
                self._database.lock_project(connection, project)
            is_new = create_run(connection, project, create, now)
            if check is not None:
                _check_quotas(connection, project, check, runs=is_new, tags=bool(create.tags))
            return read_run(connection, create.run_id), is_new

    def page(self, query: RunQuery, now: float, stale_after_seconds: float) -> RunPageRecord:
        """A page of runs, newest first."""
        with self._database.reading() as connection:
            return read_page(connection, query, now, stale_after_seconds)

    def get(self, run_id: str) -> RunRecord:
        """One run."""
        with self._database.reading() as connection:
            return read_run(connection, run_id)

    def revisions(self, run_ids: Sequence[str]) -> dict[str, RunRevision]:
        """The revision of each of these runs, in the order given."""
        with self._database.reading() as connection:
            ids = list(dict.fromkeys(run_ids))
            latest = schema.run_latest
            runs = {row.run_id: row for row in connection.execute(select(_RUN).where(_RUN.c.run_id.in_(ids)))}
            reports = func.sum(latest.c.reports).label("reports")
            newest = func.max(latest.c.last_report_at).label("last_report_at")
            more = (func.count().label("streams"), func.max(latest.c.frozen_step).label("frozen_step"))
            counted = connection.execute(
                select(latest.c.run_id, reports, newest, *more)
                .where(latest.c.run_id.in_(ids))
                .group_by(latest.c.run_id)
            )
            stored = {row.run_id: row for row in counted}
            attempts = rows_by_run(connection, attempts_of_runs(), ids)
            found = {}
            for run_id in ids:
                if run_id not in runs:
                    raise missing_run(connection, run_id)
                run, known = runs[run_id], stored.get(run_id)
                found[run_id] = RunRevision(
                    state=run.state,
                    updated_at=max(run.updated_at, known.last_report_at or 0.0) if known else run.updated_at,
                    launched_at=run.updated_at,
                    changed_at=run.changed_at,
                    reports=int(known.reports) if known else 0,
                    strategy=run.strategy,
                    dtype=run.dtype,
                    streams=known.streams if known else 0,
                    frozen_step=known.frozen_step if known else None,
                    attempts=tuple((entry.attempt, entry.measured_from) for entry in attempts[run_id]),
                )
            return found

    def update(self, run_id: str, update: wire.RunUpdate, now: float, check: QuotaCheck | None = None) -> RunRecord:
        """Change a run. `check` may refuse what its project would then hold."""
        with self._database.freeing() as connection:
            counted = None
            if check is not None and update.tags:
                counted = read_run(connection, run_id).project
                self._database.lock_project(connection, counted)
            update_run(connection, run_id, update, now)
            if check is not None and counted is not None:
                _check_quotas(connection, counted, check, runs=False, tags=True)
            return read_run(connection, run_id)

    def delete(self, run_id: str, now: float, audit_entries: Sequence[wire.AuditLogEntry] = ()) -> None:
        """Make a run invisible: a tombstone stays, and its streams' ids, so that their reports answer 410.

        `audit_entries` go to the audit log. What is large (journal, chunks) is removed afterwards, in slices.
        """
        with self._database.freeing() as connection:
            project = connection.execute(
                select(_RUN.c.project).where(_RUN.c.run_id == run_id).with_for_update()
            ).scalar()
            if project is None:
                raise missing_run(connection, run_id)
            for table in _OWNED:
                connection.execute(delete(table).where(table.c.run_id == run_id))
            emptied = {"statistics": "[]", "layers": b"", "elements": b"", "replicas": b"", "watch": None}
            connection.execute(update(schema.stream).where(schema.stream.c.run_id == run_id).values(**emptied))
            claim = schema.seal_claim.c.run_id
            free = select(claim).where(claim == run_id).with_for_update(skip_locked=True)
            connection.execute(delete(schema.seal_claim).where(claim.in_(free)))
            connection.execute(insert(schema.deleted_run).values(run_id=run_id, project=project, deleted_at=now))
            append_to_audit_log(connection, audit_entries)
        self._begin_purge(run_id)


def _check_quotas(connection: Connection, project: str, check: QuotaCheck, *, runs: bool, tags: bool) -> None:
    """Show `check` what this transaction has made of the project. The caller keeps others from adding meanwhile."""
    run, tag = schema.run, schema.run_tag
    if runs:
        count = select(func.count()).select_from(run).where(run.c.project == project)
        check(project, "runs", connection.execute(count).scalar_one())
    if tags:
        mine = select(run.c.run_id).where(run.c.project == project)
        count = select(func.count(tag.c.tag.distinct())).where(tag.c.run_id.in_(mine))
        check(project, "tags", connection.execute(count).scalar_one())


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
    """Set the run running again; what the request states replaces what is stored."""
    if known["project"] != project:
        raise _taken(create.run_id)
    launched = select(schema.attempt.c.attempt).where(schema.attempt.c.run_id == create.run_id)
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
        )
        if value is not None
    }
    connection.execute(
        update(_RUN).where(_RUN.c.run_id == create.run_id).values(state="running", updated_at=now, **stated)
    )
    if create.tags:
        _set_tags(connection, create.run_id, create.tags)


def _taken(run_id: str) -> Conflict:
    return Conflict(f"run_id {run_id!r} is taken by another project; choose another run_id", field="run_id")


def update_run(connection: Connection, run_id: str, change: wire.RunUpdate, now: float) -> None:
    """Change the stated fields, if any. A stated state is a sign of life; name, group, tags and notes are none."""
    require_run(connection, run_id, lock=True)
    stated = {
        name: getattr(change, name)
        for name in ("state", "name", "group", "notes")
        if getattr(change, name) is not None
    }
    if change.state is not None:
        stated["updated_at"] = now
    if stated:
        connection.execute(update(_RUN).where(_RUN.c.run_id == run_id).values(**stated))
    if not stated and change.tags is None:
        return
    note_change(connection, run_id, now)
    if change.tags is not None:
        _set_tags(connection, run_id, change.tags)


def note_change(connection: Connection, run_id: str, now: float) -> None:
    """Give the run another revision, where nothing else of it tells the change. The caller has locked the run."""
    connection.execute(update(_RUN).where(_RUN.c.run_id == run_id).values(changed_at=now))


def read_run(connection: Connection, run_id: str) -> RunRecord:
    """One run with its tags, attempts, watch and newest numbers."""
    row = connection.execute(select(_RUN).where(_RUN.c.run_id == run_id)).first()
    if row is None:
        raise missing_run(connection, run_id)
    return _records(connection, [row])[0]


def read_page(connection: Connection, query: RunQuery, now: float, stale_after_seconds: float) -> RunPageRecord:
    """A page of runs, newest first."""
    statement = select(_RUN).where(*_filters(query, now - stale_after_seconds))
    statement = statement.order_by(_RUN.c.created_at.desc(), _RUN.c.run_id.desc()).limit(query.limit + 1)
    if query.cursor is not None:
        statement = _after(statement, query.cursor)
    rows = connection.execute(statement).all()
    page, more = rows[: query.limit], len(rows) > query.limit
    cursor = _cursor(page[-1].created_at, page[-1].run_id) if more else None
    return RunPageRecord(_records(connection, page), cursor)


def read_records(
    connection: Connection, run_ids: Sequence[str], attempts: Mapping[str, list[Row[Any]]] | None = None
) -> dict[str, RunRecord]:
    """Several runs, in the order given; `attempts`: theirs, where they are read already."""
    ids = list(dict.fromkeys(run_ids))
    rows = connection.execute(_runs_by_id(), {"run_ids": ids}).all()
    if len(rows) < len(ids):
        require_runs(connection, ids)
    found = {record.run_id: record for record in _records(connection, rows, attempts)}
    return {run_id: found[run_id] for run_id in ids}


@cache
def _runs_by_id() -> Select[Any]:
    return select(_RUN).where(among(_RUN.c.run_id))


def matching(query: RunFilter) -> list[ColumnElement[bool]]:
    """The conditions of a filter on `schema.run`, but for its `state`."""
    equal = [
        (_RUN.c.project, query.project),
        (_RUN.c.strategy, query.strategy),
        (_RUN.c.group, query.group),
    ]
    filters: list[ColumnElement[bool]] = [column == value for column, value in equal if value is not None]
    tag = schema.run_tag.c
    if query.projects is not None:
        filters.append(_RUN.c.project.in_(sorted(query.projects)))
    if query.tag is not None:
        filters.append(_RUN.c.run_id.in_(select(tag.run_id).where(tag.tag == query.tag)))
    if query.q:
        tagged = select(tag.run_id).where(tag.tag.icontains(query.q, autoescape=True))
        searched = (_RUN.c.name, _RUN.c.run_id, _RUN.c.notes, _RUN.c.project, _RUN.c.group)
        words = [column.icontains(query.q, autoescape=True) for column in searched]
        filters.append(or_(*words, _RUN.c.run_id.in_(tagged)))
    return filters


def _filters(query: RunQuery, stale_before: float) -> list[ColumnElement[bool]]:
    filters = matching(query)
    if query.state in {"running", "stale"}:
        fresh = _last_sign_of_life() >= stale_before
        filters += [_RUN.c.state == "running", fresh if query.state == "running" else ~fresh]
    elif query.state is not None:
        filters.append(_RUN.c.state == query.state)
    return filters


def _last_sign_of_life() -> ColumnElement[float]:
    latest = schema.run_latest
    reported = select(func.max(latest.c.last_report_at)).where(latest.c.run_id == _RUN.c.run_id).scalar_subquery()
    return later(_RUN.c.updated_at, reported)


def _after(statement: Select[Any], cursor: str) -> Select[Any]:
    try:
        created_text, _, run_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(" ")
        created_at = float.fromhex(created_text)
    except (ValueError, OverflowError, binascii.Error) as error:
        raise Unprocessable(
            f"cursor {cursor!r} is not one of this server's; start again without it", field="cursor"
        ) from error
    older = (_RUN.c.created_at < created_at) | ((_RUN.c.created_at == created_at) & (_RUN.c.run_id < run_id))
    return statement.where(older)


def _cursor(created_at: float, run_id: str) -> str:
    return base64.urlsafe_b64encode(f"{created_at.hex()} {run_id}".encode()).decode()


def _set_tags(connection: Connection, run_id: str, tags: Sequence[str]) -> None:
    connection.execute(delete(schema.run_tag).where(schema.run_tag.c.run_id == run_id))
    rows = [{"run_id": run_id, "tag": tag, "position": i} for i, tag in enumerate(dict.fromkeys(tags))]
    if rows:
        connection.execute(insert(schema.run_tag), rows)


def _records(
    connection: Connection, rows: Sequence[Row[Any]], attempts: Mapping[str, list[Row[Any]]] | None = None
) -> list[RunRecord]:
    ids = [row.run_id for row in rows]
    if attempts is None:
        attempts = rows_by_run(connection, attempts_of_runs(), ids)
    tags, latest, watches = (rows_by_run(connection, statement, ids) for statement in _beside_runs())
    return [
        _record(connection, row, tags[row.run_id], attempts[row.run_id], latest[row.run_id], watches[row.run_id])
        for row in rows
    ]


@cache
def _beside_runs() -> tuple[Select[Any], ...]:
    """Of some runs tags, the newest of each stream, and what each said when it began."""
    tag, latest, stream = schema.run_tag, schema.run_latest, schema.stream
    said = [stream.c[name] for name in ("run_id", "attempt", "rank", "watch")]
    return (
        select(tag).where(among(tag.c.run_id)).order_by(tag.c.position),
        select(latest).where(among(latest.c.run_id)),
        select(*said).where(stream.c.watch.is_not(None), among(stream.c.run_id)),
    )


@cache
def attempts_of_runs() -> Select[Any]:
    """The attempts of some runs, oldest first, with `measured_from` where they measure."""
    attempt = schema.attempt
    begun = select(attempt, schema.measured_attempt.c.measured_from).select_from(schema.attempts)
    return begun.where(among(attempt.c.run_id)).order_by(attempt.c.attempt)


def rows_by_run(connection: Connection, statement: Select[Any], ids: Sequence[str]) -> dict[str, list[Row[Any]]]:
    """What the statement finds of each of these runs."""
    grouped: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(statement, {"run_ids": ids}):
        grouped[row.run_id].append(row)
    return grouped


def _record(
    connection: Connection,
    row: Row[Any],
    tags: list[Row[Any]],
    attempts: list[Row[Any]],
    latest: list[Row[Any]],
    watches: list[Row[Any]],
) -> RunRecord:
    first_hidden = first_hidden_steps([(entry.attempt, entry.measured_from) for entry in attempts])
    scalars = newest_scalars(connection, latest, first_hidden)
    watch = max(watches, key=lambda entry: (entry.attempt, -entry.rank), default=None)
    reported = [entry for entry in latest if entry.last_report_at is not None]
    newest = max((entry.attempt for entry in reported), default=0)
    last_report_at = max((entry.last_report_at for entry in reported), default=None)
    return RunRecord(
        **{column: getattr(row, column) for column in _AS_STORED},
        tags=[entry.tag for entry in tags],
        config=from_json(row.config),
        updated_at=max(row.updated_at, last_report_at or 0.0),
        first_step=min((entry.first_step for entry in reported), default=None),
        last_step=_last_step(attempts, reported, scalars),
        last_attempt=newest or None,
        first_time=min((entry.first_time for entry in reported), default=None),
        last_report_at=last_report_at,
        reports=sum(entry.reports for entry in latest),
        reports_dropped=sum_of_newest("reports_dropped", latest, newest),
        attempts=[msgspec.convert(entry, wire.Attempt, from_attributes=True) for entry in attempts],
        watch=None if watch is None else msgspec.json.decode(watch.watch, type=wire.WatchInfo),
        scalars=scalars,
    )


def _last_step(
    attempts: list[Row[Any]], reported: list[Row[Any]], scalars: Mapping[str, wire.LoggedScalar]
) -> int | None:
    """The newest step at which something is seen: of the newest measuring attempt, and of what was logged."""
    measuring = {entry.attempt for entry in attempts if entry.measured_from is not None}
    newest = max((entry.attempt for entry in reported if entry.attempt in measuring), default=0)
    steps = [entry.last_step for entry in reported if entry.attempt == newest]
    return max([*steps, *(entry.step for entry in scalars.values())], default=None)
