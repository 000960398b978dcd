"""Overviews, one row per run: finds those outdated by new reports or by older code, and the values of filters.

`overview_keeper.py` fills it, the table of runs reads it. An overview made by other code is only out of date, so
its form may change with the contract's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import delete, func, insert, select

from collage_monitor import wire
from collage_monitor.metrics import preferred_state
from collage_server.store import schema
from collage_server.store.engine.database import Database
from collage_server.store.records import RunRecord
from collage_server.store.row_helpers import from_json, to_json
from collage_server.store.runs.derived_rows import DerivedRows

__all__ = ["DECODE_OVERVIEW", "DueRun", "OverviewStore"]

_RUN: Final = schema.run
_OVERVIEW: Final = schema.run_overview
DECODE_OVERVIEW: Final = msgspec.json.Decoder(wire.Overview).decode


@dataclass(frozen=True)
class DueRun:
    """A run whose overview is missing or older than its newest reports, with its state at the time of the look.

    is_reworded: nothing came since, but other code made the overview.
    """

    run_id: str
    state: str
    updated_at: float
    reports: int
    is_new: bool
    is_reworded: bool = False


class OverviewStore(DerivedRows):
    """Overviews: the due ones, and their content."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, _OVERVIEW)

    def due(self, limit: int, made_by: str | None = None) -> list[DueRun]:
        """Runs whose overview is missing or out of date: new ones first, then those that ended.

        Last come those of which nothing is new, but which other code than `made_by` has evaluated (None: any).
        """
        due = self._due(made_by)
        has = due.selected_columns
        order = (has.is_new.desc(), has.is_reworded, has.state == "running", has.updated_at.desc())
        with self._database.reading() as connection:
            return [
                DueRun(
                    row.run_id,
                    row.state,
                    row.updated_at,
                    int(row.reports),
                    bool(row.is_new),
                    bool(row.is_reworded),
                )
                for row in connection.execute(due.order_by(*order).limit(limit))
            ]

    def put(self, due: DueRun, record: RunRecord, overview: wire.Overview, made_by: str | None = None) -> None:
        """Keep an overview and which code made it; of a run deleted meanwhile nothing is kept."""
        with self._database.writing() as connection:
            # Locked first: a row that another server puts meanwhile would not be seen by the deletion.
            there = select(_RUN.c.run_id).where(_RUN.c.run_id == due.run_id).with_for_update()
            run = connection.execute(there).first()
            connection.execute(delete(_OVERVIEW).where(_OVERVIEW.c.run_id == due.run_id))
            if run is None:
                return
            connection.execute(
                insert(_OVERVIEW).values(
                    run_id=due.run_id,
                    updated_at=due.updated_at,
                    reports=due.reports,
                    last_step=record.last_step,
                    health=overview.health,
                    findings=to_json(overview.findings) if overview.findings else None,
                    intended_share=_finite(overview.intended_share),
                    overview=to_json(overview),
                    made_by=made_by,
                    made_at=time.time(),
                    **_numbers(record, overview),
                )
            )

    def of(self, run_id: str, made_by: str | None = None) -> wire.Overview | None:
        """The overview of a run, if it was evaluated, and not by other code before this process began."""
        mine = (_OVERVIEW.c.run_id == run_id, ~self._is_made_by_others(made_by))
        with self._database.reading() as connection:
            text = connection.execute(select(_OVERVIEW.c.overview).where(*mine)).scalar()
        return None if text is None else DECODE_OVERVIEW(text)

    def findings(self, run_ids: Sequence[str]) -> dict[str, dict[str, float]]:
        """The findings against these runs, by run and metric; runs without findings are left out."""
        chosen = select(_OVERVIEW.c.run_id, _OVERVIEW.c.findings).where(
            _OVERVIEW.c.run_id.in_(run_ids), _OVERVIEW.c.findings.is_not(None)
        )
        with self._database.reading() as connection:
            return {row.run_id: from_json(row.findings) for row in connection.execute(chosen)}

    def filters(self, projects: Sequence[str] | None) -> wire.RunFilters:
        """The values that runs can be filtered by, with how many runs have each."""
        mine = [] if projects is None else [_RUN.c.project.in_(sorted(projects))]

        def counted(column: Any, *joins: tuple[Any, Any]) -> dict[str, int]:
            statement = select(column.label("value"), func.count().label("runs")).select_from(_RUN)
            for table, condition in joins:
                statement = statement.join(table, condition)
            statement = statement.where(*mine, column.is_not(None)).group_by(column).order_by(column)
            return {row.value: row.runs for row in connection.execute(statement)}

        with self._database.reading() as connection:
            return wire.RunFilters(
                project=counted(_RUN.c.project),
                strategy=counted(_RUN.c.strategy),
                group=counted(_RUN.c.group),
                tag=counted(schema.run_tag.c.tag, (schema.run_tag, schema.run_tag.c.run_id == _RUN.c.run_id)),
                health=counted(_OVERVIEW.c.health, (_OVERVIEW, _OVERVIEW.c.run_id == _RUN.c.run_id)),
            )


def _numbers(record: RunRecord, overview: wire.Overview) -> dict[str, float | None]:
    logged = {name: entry.value for name, entry in record.scalars.items()}
    state = preferred_state(overview.numbers)
    known: dict[str, Any] = {**logged, **overview.numbers}
    known["state_decrement_ratio"] = None if state is None else overview.numbers[state]
    return {name: _finite(known.get(name)) for name in schema.OVERVIEW_NUMBERS}


def _finite(value: Any) -> float | None:
    number = float("nan") if value is None else float(value)
    return number if abs(number) < float("inf") else None
