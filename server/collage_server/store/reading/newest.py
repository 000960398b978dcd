"""Newest measured steps of many runs at once, where each is one report of one process that still is in the journal.

So it is for most running runs, and takes four statements for all of them. What has to be put together (several
ranks, parts, a step that is sealed or hidden) is left to `read_latest`, which takes about twenty statements a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, func, select

from collage_server.store import schema
from collage_server.store.records import FloatArray
from collage_server.store.rows import from_json
from collage_server.store.runs.latest import first_hidden_steps

__all__ = ["NewestReport", "read_newest_reports"]

_NEIGHBOURS: Final = 64
"""Among so many reports before the newest measured one, and all after it, others of its step are looked for."""


@dataclass(frozen=True, eq=False)
class NewestReport:
    """Totals of a run's newest measured step: `model` [statistic], `layers` [statistic][layer]."""

    statistics: tuple[str, ...]
    model: FloatArray
    layers: FloatArray


def read_newest_reports(connection: Connection, run_ids: Sequence[str]) -> dict[str, NewestReport]:
    """By run, as far as one report tells all; a run that was deleted is not in it."""
    measured: dict[str, list[Any]] = defaultdict(list)
    for row in _measured_streams(connection, run_ids):
        measured[row.run_id].append(row)
    hidden, sealed = _bounds(connection, run_ids), _sealed_steps(connection, run_ids)
    alone: dict[tuple[str, str], Any] = {}
    for run_id, rows in measured.items():
        newest = max(row.attempt for row in rows)
        row, *others = [row for row in rows if row.attempt == newest]
        place = (run_id, newest)
        if not others and not any(row.replicas) and sealed.get(place, -1) < row.measured_step < hidden[place]:
            alone[run_id, row.stream_id] = row
    reports: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for report in _reports(connection, [run_id for run_id, _ in alone]):
        reports[report.run_id, report.stream_id].append(report)
    return {
        key[0]: _decoded(alone[key].statistics, found[0])
        for key, found in reports.items()
        if key in alone and len(found) == 1 and found[0].parts == 1
    }


def _measured_streams(connection: Connection, run_ids: Sequence[str]) -> Sequence[Any]:
    run, stream, latest = schema.run, schema.stream, schema.run_latest
    there = latest.join(run, run.c.run_id == latest.c.run_id).join(
        stream, (stream.c.run_id == latest.c.run_id) & (stream.c.stream_id == latest.c.stream_id)
    )
    columns = (latest.c.run_id, latest.c.stream_id, latest.c.attempt, latest.c.measured_step)
    statement = select(*columns, stream.c.statistics, stream.c.replicas).select_from(there)
    wanted = (latest.c.run_id.in_(run_ids), latest.c.measured_step.is_not(None))
    return connection.execute(statement.where(*wanted)).all()


def _bounds(connection: Connection, run_ids: Sequence[str]) -> dict[tuple[str, int], int]:
    """(run, attempt) → the step from which newer attempts hide it."""
    table = schema.attempt
    attempts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    statement = select(table.c.run_id, table.c.attempt, table.c.first_step).where(table.c.run_id.in_(run_ids))
    for run_id, attempt, first_step in connection.execute(statement).all():
        attempts[run_id].append((attempt, first_step))
    return {
        (run_id, attempt): bound
        for run_id, known in attempts.items()
        for attempt, bound in first_hidden_steps(known).items()
    }


def _sealed_steps(connection: Connection, run_ids: Sequence[str]) -> dict[tuple[str, int], int]:
    """(run, attempt) → the last step that is sealed."""
    table = schema.point_chunk
    statement = select(table.c.run_id, table.c.attempt, func.max(table.c.last_step))
    statement = statement.where(table.c.run_id.in_(run_ids), table.c.level == 1)
    rows = connection.execute(statement.group_by(table.c.run_id, table.c.attempt)).all()
    return {(run_id, attempt): step for run_id, attempt, step in rows}


def _reports(connection: Connection, run_ids: Sequence[str]) -> Sequence[Any]:
    report, latest = schema.report, schema.run_latest
    same = (report.c.run_id == latest.c.run_id) & (report.c.stream_id == latest.c.stream_id)
    near = report.c.seq >= latest.c.measured_seq - _NEIGHBOURS
    names = ("run_id", "stream_id", "parts", "statistic_count", "layer_count", "model", "statistics")
    statement = select(*(report.c[name] for name in names)).select_from(latest.join(report, same & near))
    newest = (report.c.step == latest.c.measured_step, report.c.model.is_not(None))
    return connection.execute(statement.where(latest.c.run_id.in_(run_ids), *newest)).all()


@lru_cache(maxsize=1024)
def _names(text: str) -> tuple[str, ...]:
    return tuple(from_json(text))


def _decoded(statistics: str, report: Any) -> NewestReport:
    count = report.statistic_count
    layers = np.frombuffer(report.statistics or b"", dtype="<f8")
    width = report.layer_count if report.statistics else 0
    return NewestReport(
        _names(statistics)[:count], np.frombuffer(report.model, dtype="<f8"), layers.reshape(count, width)
    )
