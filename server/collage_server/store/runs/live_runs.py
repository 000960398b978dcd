"""Running, not stale runs with the values of their gauges: few columns, no configuration, no tags.

`exposition.py` takes them by `Snapshot.live_runs`, for `/metrics` and the alerts' rounds. Fixed: the order and
`Place` belong together, statements do not grow with runs, no whole record is read
(`tests/server/test_exposition.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import BindParameter, Connection, Double, Select, String, bindparam, exists, or_, select, tuple_

from collage_monitor import wire
from collage_server.store import schema
from collage_server.store.records import ReportedState
from collage_server.store.row_helpers import among
from collage_server.store.runs.newest_points import NewestPoint, decode_point
from collage_server.store.runs.reported_state import reported_state
from collage_server.store.runs.run_store import attempts_from, attempts_of_runs, latest_of_runs, rows_by_run

__all__ = ["LiveRun", "LiveRunPage", "Place", "read_live_runs"]

_RUN: Final = schema.run
_DECODE_FINDINGS: Final = msgspec.json.Decoder(list[wire.Finding]).decode
Place = tuple[float, str]
"""When a run was created, and its id."""


class LiveRun(NamedTuple):
    """A live run; `point` is its newest measured step, None where nothing is measured, `findings` what
    speaks against it, and `intended_share` as in `wire.Overview`: all as `newest_keeper.py`
    and `overview_keeper.py` have written them.
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
    ids = [row.run_id for row in rows]
    latest, attempts = (
        rows_by_run(connection, statement, ids) for statement in (latest_of_runs(), attempts_of_runs())
    )
    runs = [
        LiveRun(
            *(run_id, project, name, strategy, created_at),
            reported_state(connection, attempts_from(attempts[run_id]), latest[run_id]),
            None if point is None else decode_point(point),
            [] if findings is None else _DECODE_FINDINGS(findings),
            intended_share,
        )
        for run_id, project, name, strategy, created_at, point, findings, intended_share in rows
    ]
    return LiveRunPage(runs, (rows[-1].created_at, rows[-1].run_id) if len(rows) == limit else None)


@cache
def _page(*, of_some_projects: bool, is_first: bool) -> Select[Any]:
    """The statement of a page, of some projects or of all: the first, or one that goes on after a run."""
    newest, overview, latest = schema.run_newest, schema.run_overview, schema.run_latest
    stale_before: BindParameter[float] = bindparam("stale_before")
    training = (latest.c.run_id == _RUN.c.run_id, latest.c.attempt > 0)
    reported = exists().where(*training, latest.c.last_report_at >= stale_before)
    shown = (_RUN.c[name] for name in ("run_id", "project", "name", "strategy", "created_at"))
    statement = (
        select(*shown, newest.c.point, overview.c.findings, overview.c.intended_share)
        .join(newest, newest.c.run_id == _RUN.c.run_id)
        .outerjoin(overview, overview.c.run_id == _RUN.c.run_id)
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
