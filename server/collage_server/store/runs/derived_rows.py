"""Rows that the background derives from each run: rows that are missing, out of date, or made by other code.

`NewestStore` and `OverviewStore` are `DerivedRows`: each has a table with one row a run. Their `due` puts the runs
that `_due` finds into an order of its own. The background threads of `newest_keeper.py` and
`overview_keeper.py` make the rows, and `put` keeps them.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, false, func, or_, select

from collage_server.store import schema
from collage_server.store.engine.database import Database
from collage_server.store.records import CLOCK_SLACK_SECONDS
from collage_server.store.row_helpers import later
from collage_server.store.runs.reported_state import TRAINING_REPORTED_AT

__all__ = ["DerivedRows"]


class DerivedRows:
    """One row a run in `table`: its `updated_at` and `reports` are the run's when `made_by`, the code, made it."""

    def __init__(self, database: Database, table: Table) -> None:
        self._database = database
        self._table = table
        self._began_at = time.time()

    def _due(self, made_by: str | None) -> Select[Any]:
        """The runs whose row is due, each with its state, last sign of life, and reports of all ranks.

        `is_new`: it has no row. `is_reworded`: nothing came since, but other code than `made_by` made it; None:
        any code will do.
        """
        run, kept, latest = schema.run, self._table, schema.run_latest
        reported = (
            select(
                latest.c.run_id,
                func.sum(latest.c.reports).label("reports"),
                TRAINING_REPORTED_AT.label("last_report_at"),
            )
            .group_by(latest.c.run_id)
            .subquery()
        )
        updated_at = later(run.c.updated_at, reported.c.last_report_at)
        reports = func.coalesce(reported.c.reports, 0)
        is_new, is_old = kept.c.run_id.is_(None), or_(kept.c.reports != reports, kept.c.updated_at != updated_at)
        is_reworded = and_(~is_old, self._is_made_by_others(made_by))
        return (
            select(run.c.run_id, run.c.state, updated_at.label("updated_at"), reports.label("reports"))
            .add_columns(is_new.label("is_new"), is_reworded.label("is_reworded"))
            .select_from(run)
            .outerjoin(reported, reported.c.run_id == run.c.run_id)
            .outerjoin(kept, kept.c.run_id == run.c.run_id)
            .where(or_(is_new, is_old, is_reworded))
        )

    def _is_made_by_others(self, made_by: str | None) -> ColumnElement[bool]:
        """Only rows made before this process began; otherwise servers of two releases would rewrite each other's
        rows forever."""
        if made_by is None:
            return false()
        kept = self._table
        made_at = func.coalesce(kept.c.made_at, 0.0)
        # In the future: a clock was ahead then.
        earlier = or_(made_at < self._began_at, made_at > time.time() + CLOCK_SLACK_SECONDS)
        return and_(func.coalesce(kept.c.made_by, "") != made_by, earlier)
