"""What the streams of a run have reported last, read from `run_latest`.

Ingest writes `run_latest` with each report; nothing here writes (`tests/server/store/ranks.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from sqlalchemy import Connection, Row, case, func, select

from collage_monitor import wire
from collage_monitor.wire import LoggedScalar
from collage_server.errors import Busy
from collage_server.store import schema
from collage_server.store.engine.database import ARCHIVE
from collage_server.store.records import UNBOUNDED, ReportedState, first_hidden_steps
from collage_server.store.row_checks import REPORT_PARTS, or_damaged, require_report, whole_logged
from collage_server.store.row_helpers import later, scalars_from_json

__all__ = [
    "LAST_SIGN_OF_LIFE",
    "TRAINING_REPORTED_AT",
    "all_ranks_are_through",
    "awaited_streams",
    "last_sealed_steps",
    "newest_logged_steps",
    "newest_measured_step",
    "reported_state",
]

_PASSED: Final = 64
"""A rank is no longer waited for after passing so many measured steps of another rank without one of its own."""
_DECODE: Final = msgspec.json.Decoder(dict[str, tuple[int, wire.Number]]).decode
_LATEST: Final = schema.run_latest
TRAINING_REPORTED_AT: Final = func.max(case((_LATEST.c.attempt > 0, _LATEST.c.last_report_at)))
"""When the training reported last; second writers' reports do not count."""
LAST_SIGN_OF_LIFE: Final = later(
    schema.run.c.updated_at,
    select(TRAINING_REPORTED_AT).where(_LATEST.c.run_id == schema.run.c.run_id).scalar_subquery(),
)
"""A run's last sign of life: a report of its training, a launch, or a state that was set."""


def reported_state(
    connection: Connection, attempts: Sequence[wire.Attempt], latest: Sequence[Row[Any]]
) -> ReportedState:
    """A summary of a run's streams, from their rows of `run_latest` and its attempts, oldest first."""
    if not latest and not attempts:
        return _NOTHING
    first_hidden = first_hidden_steps([(entry.attempt, entry.measured_from) for entry in attempts])
    training = [entry for entry in latest if entry.attempt > 0]
    scalars = _newest_scalars(connection, training, first_hidden)
    beside = _newest_scalars(connection, [entry for entry in latest if entry.attempt < 0], {})
    reported = [entry for entry in training if entry.last_report_at is not None]
    newest = max((entry.attempt for entry in reported), default=0)
    return ReportedState(
        attempts=list(attempts),
        first_step=min((entry.first_step for entry in reported), default=None),
        last_step=_last_step(attempts, reported, scalars),
        last_attempt=newest or None,
        first_time=min((entry.first_time for entry in reported), default=None),
        last_report_at=max((entry.last_report_at for entry in reported), default=None),
        reports=sum(entry.reports for entry in latest),
        reports_dropped=_sum_of_newest("reports_dropped", latest, newest),
        scalars=dict(sorted({**beside, **scalars}.items())),
        beside=sorted(beside.keys() - scalars.keys()),
    )


_NOTHING: Final = ReportedState(
    attempts=[],
    first_step=None,
    last_step=None,
    last_attempt=None,
    first_time=None,
    last_report_at=None,
    reports=0,
    reports_dropped=None,
    scalars={},
)


def _last_step(
    attempts: Sequence[wire.Attempt], reported: list[Row[Any]], scalars: Mapping[str, LoggedScalar]
) -> int | None:
    """The newest visible step: of the newest measuring attempt, and of logged values."""
    measuring = {entry.attempt for entry in attempts if entry.measured_from is not None}
    newest = max((entry.attempt for entry in reported if entry.attempt in measuring), default=0)
    steps = [entry.last_step for entry in reported if entry.attempt == newest]
    return max([*steps, *(entry.step for entry in scalars.values())], default=None)


def _newest_scalars(
    connection: Connection, latest: Sequence[Row[Any]], first_hidden: Mapping[int, int]
) -> dict[str, LoggedScalar]:
    """The newest visible value of each logged name: of the newest attempt that logged it, at its highest step.

    For second writers, who hide nothing, the value at the highest step, and there that of the newest launch.

    From its first value of a name on, an attempt hides what older ones logged under it. For each stream `latest`
    has only the last value. Where that is hidden, the one before is read, unless another stream has a newer one.
    """
    found: dict[str, tuple[tuple[int, int, int], LoggedScalar]] = {}
    hidden: list[tuple[Row[Any], int, list[str]]] = []

    def offer(row: Row[Any], name: str, step: int, value: wire.Number) -> None:
        place = (row.attempt, step, -row.rank) if row.attempt > 0 else (0, step, -row.attempt)
        if name not in found or place > found[name][0]:
            found[name] = (place, LoggedScalar(step=step, value=value))

    for row in latest:
        bound, held = first_hidden.get(row.attempt, UNBOUNDED), _DECODE(row.scalars)
        for name, (step, value) in held.items():
            if step < bound:
                offer(row, name, step, value)
        hidden.append((row, bound, [name for name, (step, _) in held.items() if step >= bound]))
    for row, bound, names in hidden:
        best = (row.attempt, bound - 1, -row.rank)
        wanted = [name for name in names if name not in found or found[name][0] < best]
        for name, (step, number) in _last_values(connection, row, wanted, bound).items():
            offer(row, name, step, wire.to_number(number))
    return {name: entry for name, (_, entry) in found.items()}


class ArchivedValues(Protocol):
    """What a store's connections know as `ARCHIVE`."""

    def last_logged(
        self, connection: Connection, run_id: str, stream_id: str, names: Collection[str], before: int
    ) -> dict[str, tuple[int, float]]:
        """The last step and value of each name in a stream's files before a step."""


def _last_values(
    connection: Connection, row: Row[Any], names: Collection[str], before: int
) -> dict[str, tuple[int, float]]:
    """Step and value of what the row's stream logged last before a step, by name: in files, chunks, the journal.

    Archived values are left out while the archive is away, so that a page of runs is not refused.
    """
    found: dict[str, tuple[int, float]] = {}
    if not names:
        return found
    archive: ArchivedValues | None = connection.get_execution_options().get(ARCHIVE)
    if archive is not None:
        with suppress(Busy):
            found = archive.last_logged(connection, row.run_id, row.stream_id, names, before)
    chunk, report = schema.scalar_chunk, schema.report
    of_chunks = (chunk.c.run_id == row.run_id, chunk.c.stream_id == row.stream_id, chunk.c.name.in_(names))
    statement = select(chunk).where(*of_chunks).order_by(chunk.c.part)
    for part in map(whole_logged, connection.execute(statement.execution_options(blobs=True))):
        name, count, data = part.name, part.point_count, part.data
        steps = np.frombuffer(data, dtype="<i8", count=count)
        place = int(np.argmax(np.where(steps < before, steps, -1)))
        step = int(steps[place])
        if step < before and step >= found.get(name, (-1,))[0]:
            found[name] = (step, float(np.frombuffer(data, dtype="<f8")[2 * count + place]))
    of_journal = (report.c.run_id == row.run_id, report.c.stream_id == row.stream_id)
    columns = [report.c[name] for name in ("checks", *REPORT_PARTS["scalars"])]
    earlier = or_damaged(report.c.step < before)
    logged = select(*columns).where(*of_journal, report.c.scalars.is_not(None), earlier)
    for checks, *values in connection.execute(logged.order_by(report.c.step, report.c.seq)):
        require_report(checks, "scalars", values)
        step, scalars = values[3], values[-1]
        for name, value in scalars_from_json(scalars).items():
            if name in names and step >= found.get(name, (-1,))[0]:
                found[name] = (step, value)
    return found


def newest_logged_steps(scalars: str) -> dict[str, int]:
    """The newest step of each name that a stream has logged, from its `scalars`."""
    return {name: step for name, (step, _) in _DECODE(scalars).items()}


def _sum_of_newest(name: str, latest: Sequence[Row[Any]], attempt: int) -> float | None:
    """Sum over the ranks of one attempt of a scalar that each counts for itself; None if none logged it."""
    entries = [_DECODE(row.scalars).get(name) for row in latest if row.attempt == attempt]
    values = [float(entry[1]) for entry in entries if entry is not None]
    return sum(values) if values else None


def newest_measured_step(
    connection: Connection,
    run_id: str,
    rows: Sequence[Row[Any]],
    first_hidden: Mapping[int, int],
    stale_after_seconds: float,
) -> int | None:
    """The newest measured step that every one of the `awaited_streams` of the newest measured attempt has reached.

    For a finished run, the newest step that any rank has reached, sealed or not, because none is awaited.
    `rows`: the run's streams with what `run_latest` has of them, and the run's `state`.

    None when nothing was measured, or a newer attempt hides that step: the caller must then read the points.
    """
    rows = [row for row in rows if row.measured_step is not None]
    attempt = max((row.attempt for row in rows), default=0)
    rows = [row for row in rows if row.attempt == attempt]
    if not rows:
        return None
    if rows[0].state == "running":
        rows = awaited_streams(connection, run_id, attempt, rows, stale_after_seconds)
        step: int = min(row.measured_step for row in rows)
    else:
        step = max(row.measured_step for row in rows)
    return step if step < first_hidden.get(attempt, UNBOUNDED) else None


def all_ranks_are_through(connection: Connection, run_id: str) -> bool:
    """Whether all ranks of the newest attempt have registered and come to the same measured step.

    A rank ends the run for all when it is done; what the others measured may still be on its way.
    """
    stream, latest = schema.stream, schema.run_latest
    newest = select(func.max(stream.c.attempt)).where(stream.c.run_id == run_id).scalar_subquery()
    same = (latest.c.run_id == stream.c.run_id) & (latest.c.stream_id == stream.c.stream_id)
    rows = connection.execute(
        select(
            stream.c.rank,
            func.max(stream.c.world_size).label("ranks"),
            func.max(latest.c.measured_step).label("step"),
        )
        .join(latest, same, isouter=True)
        .where(stream.c.run_id == run_id, stream.c.attempt == newest)
        .group_by(stream.c.rank)
    ).all()
    return len(rows) >= max((row.ranks for row in rows), default=0) and len({row.step for row in rows}) <= 1


def awaited_streams(
    connection: Connection, run_id: str, attempt: int, rows: Sequence[Row[Any]], stale_after_seconds: float
) -> list[Row[Any]]:
    """The attempt's rows of `run_latest`, with reports, of ranks whose next report is awaited.

    A rank is not awaited if it has been silent for `stale_after_seconds` longer than the freshest one. Nor is one
    that still logs but no longer measures: it has passed `_PASSED` measured steps of another rank without one of
    its own, or points were sealed without it since.
    """
    freshest = max(row.last_report_at for row in rows)
    live = [row for row in rows if row.last_report_at >= freshest - stale_after_seconds]
    measuring = [row for row in live if row.measured_step is not None]
    first = min(measuring, key=lambda row: row.measured_step, default=None)
    ahead = max(measuring, key=lambda row: row.measured_step, default=None)
    if first is None or ahead is None or first.measured_step == ahead.measured_step:
        return live
    sealed = last_sealed_steps(connection, [run_id]).get((run_id, attempt), -1)
    others = _measured_steps(connection, run_id, ahead.stream_id, first.measured_step)

    def goes_on(row: Row[Any]) -> bool:
        passed = sum(row.measured_step < step <= row.last_step for step in others)
        return bool(sealed <= row.measured_step) and passed < _PASSED

    # If every rank has been given up, none is: the leader fell silent, and the others wait for each other.
    given_up = [row for row in measuring if not goes_on(row)]
    return live if len(given_up) == len(measuring) else [row for row in live if row not in given_up]


def _measured_steps(connection: Connection, run_id: str, stream_id: str, after: int) -> list[int]:
    """The stream's newest measured steps in the journal beyond `after`, so many at most as are needed."""
    table = schema.report
    mine = (table.c.run_id == run_id, table.c.stream_id == stream_id)
    statement = select(table.c.step).where(*mine, table.c.model.is_not(None), table.c.step > after)
    return list(connection.execute(statement.order_by(table.c.seq.desc()).limit(4 * _PASSED)).scalars())


def last_sealed_steps(connection: Connection, run_ids: Collection[str]) -> dict[tuple[str, int], int]:
    """(run, attempt) → the last step that is sealed."""
    table = schema.point_chunk
    statement = select(table.c.run_id, table.c.attempt, func.max(table.c.last_step))
    statement = statement.where(table.c.run_id.in_(run_ids), table.c.level == 1)
    rows = connection.execute(statement.group_by(table.c.run_id, table.c.attempt)).all()
    return {(run_id, attempt): step for run_id, attempt, step in rows}
