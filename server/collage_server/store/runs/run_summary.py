"""One summary a run, of what takes long to find: its newest measured step, finished, and its overview.

`collage_server.summariser` writes the rows in the background; `/metrics`, the alerts and the table of runs only
look them up. A row describes the run as it was when the row was made, so a reader who needs the newest step
computes it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Double,
    Select,
    String,
    and_,
    bindparam,
    delete,
    exists,
    false,
    func,
    or_,
    select,
    tuple_,
)

from collage_monitor import wire
from collage_monitor.metrics import preferred_state
from collage_server.errors import Damaged
from collage_server.store import schema
from collage_server.store.engine.database import Database
from collage_server.store.records import CLOCK_SLACK_SECONDS, ReportedState, RunRecord
from collage_server.store.row_checks import (
    is_row_whole,
    require_row,
    tell_damage,
    update_rows,
    whole_of,
    whole_runs,
)
from collage_server.store.row_crc import CRC_BYTES, checks_of, group_check
from collage_server.store.row_helpers import among, insert_into, later, require_newest_first, to_json
from collage_server.store.runs.reported_state import TRAINING_REPORTED_AT, reported_state
from collage_server.store.runs.run_store import (
    OF_ATTEMPTS,
    OF_LATEST,
    attempts_from,
    attempts_of_runs,
    latest_of_runs,
    rows_by_run,
)

__all__ = [
    "DECODE_OVERVIEW",
    "DueRun",
    "KeptPoint",
    "LiveRun",
    "LiveRunPage",
    "NewestPoint",
    "Place",
    "RunProgress",
    "SummaryStore",
    "read_kept_points",
    "read_live_runs",
]

_RUN, _SUMMARY = schema.run, schema.run_summary
_UNKNOWN: Final = -1
_OF_POINT, _OF_ALERTS = 0, 2
"""Groups of columns with a check of their own: see `row_crc`."""
_KEPT: Final = ("run_id", "updated_at", "reports", "point", "is_evaluated", "checks")
_DECODE_FINDINGS: Final = msgspec.json.Decoder(list[wire.Finding]).decode
Place = tuple[float, str]
"""When a run was created, and its id."""


class NewestPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest measured step of a run: its metrics with intervals, undefined ones None, and its worst layers.

    `made_by` is the release that computed it.
    """

    step: int
    time: float
    model: dict[str, wire.Number | None]
    worst: list[wire.WorstLayer]
    made_by: str


class RunProgress(NamedTuple):
    """How far a run was when something was made of it: its last sign of life and the reports of all its ranks."""

    updated_at: float
    reports: int


class KeptPoint(NamedTuple):
    """The newest step as it was written; `point` is None where nothing was measured yet."""

    progress: RunProgress
    point: NewestPoint | None


class DueRun(NamedTuple):
    """A run without an overview of its newest reports, and its progress when its row was read.

    is_new: it has no overview. is_reworded: nothing came since, but other code made the overview.
    """

    run_id: str
    progress: RunProgress
    is_new: bool
    is_reworded: bool


_decode_point: Final = msgspec.msgpack.Decoder(NewestPoint).decode
DECODE_OVERVIEW: Final = msgspec.json.Decoder(wire.Overview).decode


class SummaryStore:
    """The rows: which of them are out of date, and their content."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._began_at = time.time()

    def due_points(self, limit: int) -> dict[str, RunProgress]:
        """The runs whose row is missing or older than their reports, running ones first, with their progress."""
        latest = schema.run_latest
        reported = (
            select(
                latest.c.run_id,
                func.sum(latest.c.reports).label("reports"),
                TRAINING_REPORTED_AT.label("last_report_at"),
            )
            .group_by(latest.c.run_id)
            .subquery()
        )
        updated_at = later(_RUN.c.updated_at, reported.c.last_report_at)
        reports = func.coalesce(reported.c.reports, 0)
        known = func.coalesce(_SUMMARY.c.reports, _UNKNOWN)
        due = (
            select(_RUN.c.run_id, updated_at.label("updated_at"), reports.label("reports"))
            .outerjoin(reported, reported.c.run_id == _RUN.c.run_id)
            .outerjoin(_SUMMARY, _SUMMARY.c.run_id == _RUN.c.run_id)
            .where(or_(known != reports, _SUMMARY.c.updated_at != updated_at))
            .order_by((_RUN.c.state == "running").desc(), updated_at.desc())
        )
        with self._database.reading() as connection:
            rows = connection.execute(due.limit(limit)).all()
        return {row.run_id: RunProgress(row.updated_at, int(row.reports)) for row in rows}

    def put_points(self, found: Mapping[str, KeptPoint]) -> None:
        """Keep the newest points of several runs; of one that was deleted meanwhile nothing is kept."""
        with self._database.writing() as connection:
            rows = [
                {
                    "run_id": run_id,
                    **found[run_id].progress._asdict(),
                    "point": None if found[run_id].point is None else msgspec.msgpack.encode(found[run_id].point),
                    "is_evaluated": False,
                }
                for run_id in connection.execute(_locked(found)).scalars().all()
            ]
            checks = select(_SUMMARY.c.run_id, _SUMMARY.c.checks).where(_SUMMARY.c.run_id.in_(found))
            known = {row.run_id: row.checks for row in connection.execute(checks)}
            for row in rows:
                row["checks"] = _with_point(row, known)
            if rows:
                statement = insert_into(connection, _SUMMARY)
                replaced = {name: statement.excluded[name] for name in rows[0] if name != "run_id"}
                connection.execute(statement.on_conflict_do_update(index_elements=["run_id"], set_=replaced), rows)

    def mark_unreadable(self, run_id: str) -> None:
        """Show the run in `/metrics` no more, rather than with old numbers, until it can be read again."""
        mine = _SUMMARY.c.run_id == run_id
        with self._database.writing() as connection:
            try:
                update_rows(connection, _SUMMARY, {"reports": _UNKNOWN, "point": None}, mine)
            except Damaged:
                connection.execute(delete(_SUMMARY).where(mine))

    def due(self, limit: int, made_by: str | None = None) -> list[DueRun]:
        """Runs whose overview is missing or out of date: new ones first, then those that ended.

        Last come those of which nothing is new, but which other code than `made_by` has evaluated (None: any).
        Only runs whose newest point is written can be due.
        """
        is_new = _SUMMARY.c.overview.is_(None).label("is_new")
        is_reworded = and_(_SUMMARY.c.is_evaluated, self._is_made_by_others(made_by)).label("is_reworded")
        order = (is_new.desc(), is_reworded, _RUN.c.state == "running", _SUMMARY.c.updated_at.desc())
        due = (
            select(_RUN.c.run_id, _SUMMARY.c.updated_at, _SUMMARY.c.reports, is_new, is_reworded)
            .join(_SUMMARY, _SUMMARY.c.run_id == _RUN.c.run_id)
            .where(_SUMMARY.c.reports != _UNKNOWN, or_(~_SUMMARY.c.is_evaluated, is_reworded))
            .order_by(*order)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [
                DueRun(run_id, RunProgress(*progress), bool(new), bool(reworded))
                for run_id, *progress, new, reworded in connection.execute(due)
            ]

    def _is_made_by_others(self, made_by: str | None) -> ColumnElement[bool]:
        """Only overviews made before this process began; otherwise servers of two releases would rewrite each
        other's forever."""
        if made_by is None:
            return false()
        made_at = func.coalesce(_SUMMARY.c.made_at, 0.0)
        # In the future: a clock was ahead then.
        earlier = or_(made_at < self._began_at, made_at > time.time() + CLOCK_SLACK_SECONDS)
        return and_(func.coalesce(_SUMMARY.c.made_by, "") != made_by, earlier)

    def put(self, record: RunRecord, overview: wire.Overview, made_by: str | None = None) -> None:
        """Keep an overview and which code made it; of a run deleted meanwhile nothing is kept."""
        values = {
            "last_step": record.last_step,
            "health": overview.health,
            "findings": to_json(overview.against) if overview.against else None,
            "intended_share": _finite(overview.intended_share),
            "overview": to_json(overview),
            "made_by": made_by,
            "made_at": time.time(),
            **_numbers(record, overview),
        }
        with self._database.writing() as connection:
            if connection.execute(_locked([record.run_id])).first() is not None:
                row = {**_known_point(connection, record), **values}
                row["checks"] = checks_of(_SUMMARY, row)
                statement = insert_into(connection, _SUMMARY).values(**row)
                connection.execute(statement.on_conflict_do_update(index_elements=["run_id"], set_=row))

    def overview(self, run_id: str, made_by: str | None = None) -> wire.Overview | None:
        """The overview of a run, if it was evaluated, and not by other code before this process began; None if it
        is damaged, too, so that it is made again."""
        mine = (_SUMMARY.c.run_id == run_id, ~self._is_made_by_others(made_by))
        with self._database.reading() as connection:
            rows, _ = whole_of(connection, select(_SUMMARY).where(*mine), _SUMMARY)
        return next((DECODE_OVERVIEW(row.overview) for row in rows if row.overview is not None), None)


def _with_point(row: Mapping[str, Any], known: Mapping[str, bytes | None]) -> bytes | None:
    """The checks of a row with another point; `known`: those of the rows that are there."""
    if row["run_id"] not in known:
        return checks_of(_SUMMARY, row)
    held = known[row["run_id"]]
    return None if held is None else group_check(_SUMMARY, _OF_POINT, row) + held[CRC_BYTES:]


def _known_point(connection: Connection, record: RunRecord) -> dict[str, Any]:
    """The first group of a run's columns, as they are with a new overview; a damaged point is made again, too."""
    statement = select(*(_SUMMARY.c[name] for name in _KEPT)).where(_SUMMARY.c.run_id == record.run_id)
    found = [row for row in connection.execute(statement) if is_row_whole(_SUMMARY, row, [_OF_POINT])]
    new = {"run_id": record.run_id, "updated_at": 0.0, "reports": _UNKNOWN, "point": None}
    known = {name: found[0]._mapping[name] for name in new} if found else new
    is_same = (known["updated_at"], known["reports"]) == (record.updated_at, record.reports)
    return {**known, "is_evaluated": is_same}


def _locked(run_ids: Collection[str]) -> Select[Any]:
    """Those of these runs that are there, and stay until the transaction ends."""
    return select(_RUN.c.run_id).where(_RUN.c.run_id.in_(run_ids)).order_by(_RUN.c.run_id).with_for_update()


def _numbers(record: RunRecord, overview: wire.Overview) -> dict[str, float | None]:
    logged = {name: entry.value for name, entry in record.scalars.items()}
    state = preferred_state(overview.numbers)
    known: dict[str, Any] = {**logged, **overview.numbers}
    known["state_decrement_ratio"] = None if state is None else overview.numbers[state]
    return {name: _finite(known.get(name)) for name in schema.OVERVIEW_NUMBERS}


def _finite(value: Any) -> float | None:
    number = float("nan") if value is None else float(value)
    return number if abs(number) < float("inf") else None


def read_kept_points(connection: Connection, run_ids: Sequence[str]) -> dict[str, KeptPoint]:
    """The newest points of these runs as they were written, as far as there are any, whatever code made them."""
    kept = select(*(_SUMMARY.c[name] for name in _KEPT)).where(_SUMMARY.c.run_id.in_(run_ids))
    return {
        row.run_id: KeptPoint(
            RunProgress(row.updated_at, row.reports), None if row.point is None else _decode_point(row.point)
        )
        for row in connection.execute(kept)
        if is_row_whole(_SUMMARY, row, [_OF_POINT])
    }


class LiveRun(NamedTuple):
    """A live run with the values of its gauges; no whole record is read for it.

    `point` is its newest measured step, None where nothing is measured, `findings` what speaks against
    it, by metric, and `intended_share` as in `wire.Overview`: all as they were written.
    """

    run_id: str
    project: str
    name: str
    strategy: str | None
    created_at: float
    reported: ReportedState
    point: NewestPoint | None
    findings: list[wire.Finding]
    intended_share: float | None

    @property
    def is_silent(self) -> bool:
        """Whether nothing was reported: all that is known is when it was created."""
        return self.point is None and self.reported.last_report_at is None and not self.findings


@dataclass(frozen=True)
class LiveRunPage:
    """Some live runs, newest first, and after which the next page goes on; None: there are no more."""

    runs: list[LiveRun]
    after: Place | None


def read_live_runs(
    connection: Connection, projects: Collection[str] | None, stale_before: float, after: Place | None, limit: int
) -> LiveRunPage:
    """A page of the runs with a sign of life since `stale_before`; not those whose newest step is not written yet.

    projects: those that are asked for, None for all.
    """
    given: dict[str, Any] = {"stale_before": stale_before, "limit": limit}
    if projects is not None:
        given["projects"] = sorted(projects)
    if after is not None:
        given["created_at"], given["run_id"] = after
    rows = connection.execute(_page(of_some_projects=projects is not None, is_first=after is None), given).all()
    require_newest_first([*([] if after is None else after[:1]), *(row.created_at for row in rows)])
    runs, damaged = whole_runs(partial(_live_runs, connection), [row.run_id for row in rows])
    for run in damaged:
        tell_damage(run.message)
    return LiveRunPage(list(runs.values()), (rows[-1].created_at, rows[-1].run_id) if len(rows) == limit else None)


def _live_runs(connection: Connection, run_ids: Sequence[str]) -> dict[str, LiveRun]:
    found = {row.run_id: row for row in connection.execute(_described(), {"run_ids": run_ids})}
    latest = rows_by_run(connection, latest_of_runs(), run_ids, OF_LATEST)
    attempts = rows_by_run(connection, attempts_of_runs(), run_ids, *OF_ATTEMPTS)
    runs = {}
    for run_id, row in ((run_id, found[run_id]) for run_id in run_ids):
        require_row(_SUMMARY, row, (_OF_POINT, _OF_ALERTS))
        runs[run_id] = LiveRun(
            *(run_id, row.project, row.name, row.strategy, row.created_at),
            reported_state(connection, attempts_from(attempts[run_id]), latest[run_id]),
            None if row.point is None else _decode_point(row.point),
            [] if row.findings is None else _DECODE_FINDINGS(row.findings),
            row.intended_share,
        )
    return runs


@cache
def _described() -> Select[Any]:
    """What is shown of live runs, and what was written of them."""
    shown = (_RUN.c[name] for name in ("project", "name", "strategy", "created_at"))
    written = (_SUMMARY.c[name] for name in (*_KEPT, "findings", "intended_share"))
    joined = select(*shown, *written).join(_SUMMARY, _SUMMARY.c.run_id == _RUN.c.run_id)
    return joined.where(among(_RUN.c.run_id))


@cache
def _page(*, of_some_projects: bool, is_first: bool) -> Select[Any]:
    """The statement of a page, of some projects or of all: the first, or one that goes on after a run."""
    latest = schema.run_latest
    stale_before: BindParameter[float] = bindparam("stale_before")
    training = (latest.c.run_id == _RUN.c.run_id, latest.c.attempt > 0)
    reported = exists().where(*training, latest.c.last_report_at >= stale_before)
    statement = (
        select(_RUN.c.run_id, _RUN.c.created_at)
        .join(_SUMMARY, _SUMMARY.c.run_id == _RUN.c.run_id)
        .where(_SUMMARY.c.reports != _UNKNOWN)
        .where(_RUN.c.state == "running", or_(_RUN.c.updated_at >= stale_before, reported))
        .order_by(_RUN.c.created_at.desc(), _RUN.c.run_id.desc())
        .limit(bindparam("limit"))
    )
    if of_some_projects:
        statement = statement.where(among(_RUN.c.project, "projects"))
    if not is_first:
        after = tuple_(bindparam("created_at", type_=Double), bindparam("run_id", type_=String))
        statement = statement.where(tuple_(_RUN.c.created_at, _RUN.c.run_id) < after)
    return statement
