"""The raw horizon: the step up to which an attempt accepts no more totals.

It is a column of every stream's row of `run_latest`. Ingest reads it with the row that it locks anyway. Retention
raises it in the transaction that drops the points, under the same locks, so every acknowledged report has a place.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, func, or_, select

from collage_server.store import schema
from collage_server.store.row_checks import update_rows
from collage_server.store.row_helpers import Ranges, contains, ranges_from_json, require_run

__all__ = ["freeze", "frozen_step"]

_LATEST: Final = schema.run_latest


def frozen_step(connection: Connection, run_id: str, attempt: int) -> int | None:
    """The attempt's horizon: the last step whose fine points are gone; None before there is one."""
    found = select(func.max(_LATEST.c.frozen_step)).where(*_of(run_id, attempt))
    step: int | None = connection.execute(found).scalar()
    return step


def freeze(connection: Connection, run_id: str, attempt: int, step: int) -> bool:
    """Move the attempt's horizon to `step`; False while the journal has totals at or before it that no chunk holds.

    Raises:
        NotFound: no such run.
        Gone: the run was deleted.
    """
    sealed = _lock(connection, run_id, attempt)
    report = schema.report
    waiting = select(report.c.stream_id, report.c.seq).where(
        report.c.run_id == run_id, report.c.step <= step, report.c.model.is_not(None)
    )
    for row in connection.execute(waiting):
        if row.stream_id in sealed and not contains(sealed[row.stream_id], row.seq):
            return False
    _write(connection, run_id, attempt, step)
    return True


def _lock(connection: Connection, run_id: str, attempt: int) -> dict[str, Ranges]:
    """Lock out reports and new streams of the attempt for this transaction; returns each stream's sealed ranges."""
    require_run(connection, run_id, lock=True)
    columns = (_LATEST.c.stream_id, _LATEST.c.sealed)
    rows = connection.execute(
        select(*columns).where(*_of(run_id, attempt)).order_by(_LATEST.c.stream_id).with_for_update()
    )
    return {row.stream_id: ranges_from_json(row.sealed) for row in rows}


def _write(connection: Connection, run_id: str, attempt: int, step: int) -> None:
    lower = or_(_LATEST.c.frozen_step.is_(None), _LATEST.c.frozen_step < step)
    update_rows(connection, _LATEST, {"frozen_step": step}, *_of(run_id, attempt), lower)


def _of(run_id: str, attempt: int) -> tuple[Any, ...]:
    return (_LATEST.c.run_id == run_id, _LATEST.c.attempt == attempt)
