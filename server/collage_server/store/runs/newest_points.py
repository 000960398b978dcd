"""The newest measured step of each run, finished: a row a run, so that a page about many runs only looks it up.

A row describes the run at the time that it was made. Where reports have come since, it is as old as the background
thread is late (`collage_server.newest_keeper`), and a reader who needs the newest computes it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from sqlalchemy import Connection, delete, insert, select

from collage_monitor import wire
from collage_server.store import schema
from collage_server.store.engine.database import Database
from collage_server.store.runs.derived_rows import DerivedRows

__all__ = ["KeptNewest", "NewestPoint", "NewestStore", "RunProgress", "decode_point", "read_newest"]

_RUN, _NEWEST = schema.run, schema.run_newest


class NewestPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest measured step of a run: its metrics with intervals, undefined ones None, and its worst layers."""

    step: int
    time: float
    model: dict[str, wire.Number | None]
    worst: list[wire.WorstLayer]


@dataclass(frozen=True)
class RunProgress:
    """How far a run was when something was made of it: its last sign of life and the reports of all its ranks."""

    updated_at: float
    reports: int


@dataclass(frozen=True)
class KeptNewest:
    """A row, and which code finished it: `point` is None where nothing was measured yet."""

    progress: RunProgress
    made_by: str
    point: NewestPoint | None


decode_point: Final = msgspec.msgpack.Decoder(NewestPoint).decode


class NewestStore(DerivedRows):
    """The rows, and which of them are out of date."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, _NEWEST)

    def due(self, limit: int, made_by: str) -> dict[str, RunProgress]:
        """Runs whose row is missing or out of date, running ones first, with their present state."""
        due = self._due(made_by)
        has = due.selected_columns
        order = ((has.state == "running").desc(), has.updated_at.desc())
        with self._database.reading() as connection:
            rows = connection.execute(due.order_by(*order).limit(limit)).all()
        return {row.run_id: RunProgress(row.updated_at, int(row.reports)) for row in rows}

    def put(self, found: Mapping[str, KeptNewest | None]) -> None:
        """Keep the rows of several runs; of one that was deleted meanwhile, or has none now, nothing is kept."""
        ids = sorted(found)
        with self._database.writing() as connection:
            there = select(_RUN.c.run_id).where(_RUN.c.run_id.in_(ids)).order_by(_RUN.c.run_id)
            kept = connection.execute(there.with_for_update()).scalars().all()
            connection.execute(delete(_NEWEST).where(_NEWEST.c.run_id.in_(ids)))
            rows = [_row(run_id, row) for run_id in kept if (row := found[run_id]) is not None]
            if rows:
                connection.execute(insert(_NEWEST), rows)


def _row(run_id: str, kept: KeptNewest) -> dict[str, object]:
    point = None if kept.point is None else msgspec.msgpack.encode(kept.point)
    progress = {"updated_at": kept.progress.updated_at, "reports": kept.progress.reports}
    return {"run_id": run_id, **progress, "made_by": kept.made_by, "made_at": time.time(), "point": point}


def read_newest(connection: Connection, run_ids: Sequence[str]) -> dict[str, KeptNewest]:
    """The rows of these runs, as far as there are any, whatever code made them."""
    return {
        row.run_id: KeptNewest(
            RunProgress(row.updated_at, row.reports),
            row.made_by,
            None if row.point is None else decode_point(row.point),
        )
        for row in connection.execute(select(_NEWEST).where(_NEWEST.c.run_id.in_(run_ids)))
    }
