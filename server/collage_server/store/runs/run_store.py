"""Runs: create, resume, list, change, delete.

Routes ask `store.runs`. What a run's fields mean is `wire.Run`'s; how a list is read is free.
"""

from __future__ import annotations

import base64
import binascii
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, Table, func, or_, select
from sqlalchemy.exc import IntegrityError

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.memory_budget import held_rows
from collage_server.store import schema
from collage_server.store.access.access_store import append_to_audit_log
from collage_server.store.engine.database import Database
from collage_server.store.records import (
    CLOCK_SLACK_SECONDS,
    RunFilter,
    RunPageRecord,
    RunQuery,
    RunRecord,
    RunRevision,
)
from collage_server.store.row_checks import require_row, update_rows, whole_rows, whole_runs
from collage_server.store.row_helpers import (
    among,
    from_json,
    missing_run,
    require_newest_first,
    require_run,
    require_runs,
)
from collage_server.store.runs.reported_state import LAST_SIGN_OF_LIFE, TRAINING_REPORTED_AT, reported_state
from collage_server.store.runs.run_changes import (
    QuotaCheck,
    bury_run,
    check_quotas,
    create_run,
    dig_up_run,
    forget_kept,
    update_run,
)

__all__ = [
    "CheckedPart",
    "OF_ATTEMPTS",
    "OF_LATEST",
    "RowsOfRuns",
    "RunStore",
    "attempts_from",
    "attempts_of_runs",
    "latest_of_runs",
    "matching",
    "read_page",
    "read_records",
    "rows_by_run",
]

msgspec.json.Decoder(RunRecord)  # A type is learnt at import, as in `collage_monitor.wire`.
_RUN: Final = schema.run
_ROWS_AT_ONCE: Final = 32
_RECORD_BYTES: Final = 8192
_CONFIG_GROWTH: Final = 8
"""How much more JSON takes as objects, and encoded again."""
_AS_STORED: Final = [column.name for column in _RUN.c if column.name not in {"config", "updated_at", "checks"}]


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
                check_quotas(connection, project, check, runs=int(is_new), tags=len(create.tags))
            return _read_run(connection, create.run_id), is_new

    def page(self, query: RunQuery, now: float, stale_after_seconds: float) -> RunPageRecord:
        """A page of runs, newest first."""
        with self._database.reading() as connection:
            return read_page(connection, query, now, stale_after_seconds)

    def get(self, run_id: str) -> RunRecord:
        """The record of a run."""
        with self._database.reading() as connection:
            return _read_run(connection, run_id)

    def revisions(self, run_ids: Sequence[str]) -> dict[str, RunRevision]:
        """The revision of each of these runs, in the order given."""
        with self._database.reading() as connection:
            ids = list(dict.fromkeys(run_ids))
            latest = schema.run_latest
            rows = connection.execute(select(_RUN).where(_RUN.c.run_id.in_(ids)))
            runs = {row.run_id: row for row in whole_rows(_RUN, rows)}
            reports = func.sum(latest.c.reports).label("reports")
            newest = TRAINING_REPORTED_AT.label("last_report_at")
            more = (func.count().label("streams"), func.max(latest.c.frozen_step).label("frozen_step"))
            counted = connection.execute(
                select(latest.c.run_id, reports, newest, *more)
                .where(latest.c.run_id.in_(ids))
                .group_by(latest.c.run_id)
            )
            stored = {row.run_id: row for row in counted}
            attempts = rows_by_run(connection, attempts_of_runs(), ids, *OF_ATTEMPTS)
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
                counted = require_run(connection, run_id, "project").project
                self._database.lock_project(connection, counted)
            update_run(connection, run_id, update, now)
            if check is not None and counted is not None:
                check_quotas(connection, counted, check, runs=0, tags=len(update.tags or ()))
            return _read_run(connection, run_id)

    def bring_back(self, now: float) -> int:
        """Set times later than `now` to `now`; returns the number of runs. Else they would count as live for days
        after."""
        future = now + CLOCK_SLACK_SECONDS
        latest = schema.run_latest
        with self._database.freeing() as connection:
            launched = update_rows(connection, _RUN, {"updated_at": now}, _RUN.c.updated_at > future)
            reported = select(latest.c.run_id).where(latest.c.last_report_at > future).distinct()
            found = len(connection.execute(reported).all())
            if found:
                update_rows(connection, latest, {"last_report_at": now}, latest.c.last_report_at > future)
            return max(launched, found)

    def delete(
        self,
        run_id: str,
        now: float,
        audit_entries: Sequence[wire.AuditLogEntry] = (),
        *,
        undo_seconds: float = 0.0,
    ) -> None:
        """Make a run invisible: a tombstone stays, and its streams' ids, so that their reports answer 410.

        `audit_entries` go to the audit log. Large data (journal, chunks) is removed afterwards, in slices, and only
        once the time is over in which `restore` may undo it.
        """
        with self._database.freeing() as connection:
            project = connection.execute(
                select(_RUN.c.project).where(_RUN.c.run_id == run_id).with_for_update()
            ).scalar()
            if project is None:
                raise missing_run(connection, run_id)
            bury_run(connection, run_id, project, now, undo_seconds)
            append_to_audit_log(connection, audit_entries)
        if not undo_seconds:
            self._begin_purge(run_id)

    def restore(
        self,
        run_id: str,
        now: float,
        check: QuotaCheck | None = None,
        audit_entries: Sequence[wire.AuditLogEntry] = (),
    ) -> RunRecord:
        """Undo a deletion: the run is as it was. `check` may refuse what its project would then hold.

        Raises:
            Gone: the deletion cannot be undone, or not any more.
            Damaged: what it kept was changed on the disk.
        """
        with self._database.freeing() as connection:
            project = connection.execute(
                select(schema.deleted_run.c.project).where(schema.deleted_run.c.run_id == run_id)
            ).scalar()
            if project is None:
                require_run(connection, run_id)
                return _read_run(connection, run_id)
            if check is not None:
                self._database.lock_project(connection, project)
            dig_up_run(connection, run_id, now)
            found = _read_run(connection, run_id)
            if check is not None:
                check_quotas(connection, project, check, runs=1, tags=len(found.tags))
            append_to_audit_log(connection, audit_entries)
            return found

    def end_undo(self, now: float) -> None:
        """Begin to remove the data of deleted runs that nobody brought back in time."""
        for run_id in self._until(now):
            with self._database.freeing() as connection:
                if not forget_kept(connection, run_id, now):
                    continue
            self._begin_purge(run_id)

    def _until(self, now: float) -> list[str]:
        tomb = schema.deleted_run.c
        with self._database.reading() as connection:
            return list(connection.execute(select(tomb.run_id).where(tomb.kept_until <= now)).scalars())


def _read_run(connection: Connection, run_id: str) -> RunRecord:
    """One run with its tags, attempts, watch and newest numbers."""
    row = connection.execute(select(_RUN).where(_RUN.c.run_id == run_id)).first()
    if row is None:
        raise missing_run(connection, run_id)
    return _records(connection, [row])[0]


def read_page(connection: Connection, query: RunQuery, now: float, stale_after_seconds: float) -> RunPageRecord:
    """A page of runs, newest first."""
    statement = select(_RUN.c.run_id, _RUN.c.created_at).where(*_filters(query, now - stale_after_seconds))
    statement = statement.order_by(_RUN.c.created_at.desc(), _RUN.c.run_id.desc()).limit(query.limit + 1)
    before: list[float] = []
    if query.cursor is not None:
        created_at, run_id = _place(query.cursor)
        older = (_RUN.c.created_at < created_at) | ((_RUN.c.created_at == created_at) & (_RUN.c.run_id < run_id))
        statement, before = statement.where(older), [created_at]
    places = connection.execute(statement).all()
    require_newest_first([*before, *(place.created_at for place in places)])
    page, more = places[: query.limit], len(places) > query.limit
    cursor = _cursor(page[-1].created_at, page[-1].run_id) if more else None
    records, damaged = whole_runs(partial(read_records, connection), [place.run_id for place in page])
    return RunPageRecord(list(records.values()), cursor, damaged)


class CheckedPart(NamedTuple):
    """Columns of a table in a joined row, all or some groups of them, and the column with their checks."""

    table: Table
    groups: tuple[int, ...] | None = None
    checks: str = "checks"


OF_ATTEMPTS: Final = (CheckedPart(schema.attempt), CheckedPart(schema.measured_attempt, None, "measured_checks"))
"""Of rows of `attempts_of_runs`."""
OF_LATEST: Final = CheckedPart(schema.run_latest)
"""Of rows of `latest_of_runs`."""
_OF_STREAMS: Final = (OF_LATEST, CheckedPart(schema.stream, (1,), "stream_checks"))


class RowsOfRuns(NamedTuple):
    """By run its attempts, and its streams with what they said of themselves and reported last."""

    attempts: Mapping[str, list[Row[Any]]]
    streams: Mapping[str, list[Row[Any]]]


def read_records(
    connection: Connection, run_ids: Sequence[str], known: RowsOfRuns | None = None
) -> dict[str, RunRecord]:
    """Several runs, in the order given; `known`: what is read of them already."""
    ids = list(dict.fromkeys(run_ids))
    rows = _held(connection.execute(_runs_by_id(), {"run_ids": ids}))
    if len(rows) < len(ids):
        require_runs(connection, ids)
    found = {record.run_id: record for record in _records(connection, rows, known)}
    return {run_id: found[run_id] for run_id in ids}


def _held(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """Rows of runs, charged with their config as objects."""
    return list(held_rows((row, _RECORD_BYTES + _CONFIG_GROWTH * len(row.config) + len(row.notes)) for row in rows))


@cache
def _runs_by_id() -> Select[Any]:
    return select(_RUN).where(among(_RUN.c.run_id)).execution_options(yield_per=_ROWS_AT_ONCE)


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
        fresh = stale_before <= LAST_SIGN_OF_LIFE
        filters += [_RUN.c.state == "running", fresh if query.state == "running" else ~fresh]
    elif query.state is not None:
        filters.append(_RUN.c.state == query.state)
    return filters


def _place(cursor: str) -> tuple[float, str]:
    try:
        created_text, _, run_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(" ")
        return float.fromhex(created_text), run_id
    except (ValueError, OverflowError, binascii.Error) as error:
        raise Unprocessable(
            f"cursor {cursor!r} is not one of this server's; start again without it", field="cursor"
        ) from error


def _cursor(created_at: float, run_id: str) -> str:
    return base64.urlsafe_b64encode(f"{created_at.hex()} {run_id}".encode()).decode()


def _records(connection: Connection, rows: Sequence[Row[Any]], known: RowsOfRuns | None = None) -> list[RunRecord]:
    ids = [row.run_id for row in rows]
    tags = rows_by_run(connection, _tags_of_runs(), ids, CheckedPart(schema.run_tag))
    attempts, streams = known or (
        rows_by_run(connection, attempts_of_runs(), ids, *OF_ATTEMPTS),
        rows_by_run(connection, _streams_of_runs(), ids, *_OF_STREAMS),
    )
    return [
        _record(connection, row, tags[row.run_id], attempts[row.run_id], streams[row.run_id])
        for row in whole_rows(_RUN, rows)
    ]


@cache
def _tags_of_runs() -> Select[Any]:
    tag = schema.run_tag
    return select(tag).where(among(tag.c.run_id)).order_by(tag.c.position)


@cache
def _streams_of_runs() -> Select[Any]:
    """The last reports of each stream of some runs, and what it said of the training."""
    latest, stream = schema.run_latest, schema.stream
    same = (stream.c.run_id == latest.c.run_id) & (stream.c.stream_id == latest.c.stream_id)
    return latest_of_runs().add_columns(stream.c.watch, stream.c.checks.label("stream_checks")).join(stream, same)


@cache
def latest_of_runs() -> Select[Any]:
    """The last reports of each stream of some runs."""
    latest = schema.run_latest
    return select(latest).where(among(latest.c.run_id))


@cache
def attempts_of_runs() -> Select[Any]:
    """The attempts of some runs, second writers' too, by number, with `measured_from` where they measure."""
    attempt = schema.attempt
    measured = schema.measured_attempt.c
    columns = (measured.measured_from, measured.checks.label("measured_checks"))
    begun = select(attempt, *columns).select_from(schema.attempts)
    return begun.where(among(attempt.c.run_id)).order_by(attempt.c.attempt)


def rows_by_run(
    connection: Connection, statement: Select[Any], ids: Sequence[str], *checked: CheckedPart
) -> dict[str, list[Row[Any]]]:
    """The statement's rows for each of these runs, of which these parts are compared with their checks."""
    grouped: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(statement, {"run_ids": ids}):
        for part in checked:
            require_row(part.table, row, part.groups, part.checks)
        grouped[row.run_id].append(row)
    return grouped


def _record(
    connection: Connection,
    row: Row[Any],
    tags: list[Row[Any]],
    attempts: list[Row[Any]],
    streams: list[Row[Any]],
) -> RunRecord:
    watches = (stream for stream in streams if stream.watch is not None)
    watch = max(watches, key=lambda stream: (stream.attempt, -stream.rank), default=None)
    reported = reported_state(connection, attempts_from(attempts), streams)
    return RunRecord(
        **{column: getattr(row, column) for column in _AS_STORED},
        **vars(reported),
        tags=[entry.tag for entry in tags],
        config=from_json(row.config),
        updated_at=max(row.updated_at, reported.last_report_at or 0.0),
        watch=None if watch is None else msgspec.json.decode(watch.watch, type=wire.WatchInfo),
    )


def attempts_from(rows: Sequence[Row[Any]]) -> list[wire.Attempt]:
    """The training's attempts behind rows of `attempts_of_runs`, without the launches of second writers."""
    return [msgspec.convert(row, wire.Attempt, from_attributes=True) for row in rows if row.attempt > 0]
