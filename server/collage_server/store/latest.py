"""The newest numbers of a run, read from `run_latest`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Row, select

from collage_monitor import wire
from collage_monitor.wire import LoggedScalar
from collage_server.store import schema

__all__ = [
    "hidden_from",
    "logged_names",
    "measured_state",
    "newest_measured_step",
    "newest_scalars",
    "sum_of_newest",
]

_UNBOUNDED: Final = 2**62
_DECODE: Final = msgspec.json.Decoder(dict[str, tuple[int, wire.Number]]).decode


def hidden_from(attempts: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Attempt → the step from which newer attempts hide it, from pairs (attempt, first_step)."""
    bounds = {}
    bound = _UNBOUNDED
    for attempt, first_step in sorted(attempts, reverse=True):
        bounds[attempt] = bound
        bound = min(bound, first_step)
    return bounds


def newest_scalars(latest: Sequence[Row[Any]], bounds: Mapping[int, int]) -> dict[str, LoggedScalar]:
    """The newest visible value of each logged name: highest step, then newest attempt, then lowest rank."""
    found: dict[str, tuple[tuple[int, int, int], LoggedScalar]] = {}
    for row in latest:
        for name, (step, value) in _DECODE(row.scalars).items():
            if step >= bounds.get(row.attempt, _UNBOUNDED):
                continue
            place = (step, row.attempt, -row.rank)
            if name not in found or place > found[name][0]:
                found[name] = (place, LoggedScalar(step=step, value=value))
    return {name: entry for name, (_, entry) in sorted(found.items())}


def logged_names(scalars: str) -> Iterable[str]:
    """Names that a stream has logged, from its `scalars`."""
    return _DECODE(scalars)


def sum_of_newest(name: str, latest: Sequence[Row[Any]], attempt: int) -> float | None:
    """Sum over the ranks of one attempt of a scalar that each counts for itself; None if none logged it."""
    entries = [_DECODE(row.scalars).get(name) for row in latest if row.attempt == attempt]
    values = [float(entry[1]) for entry in entries if entry is not None]
    return sum(values) if values else None


def newest_measured_step(
    connection: Connection, run_id: str, bounds: Mapping[int, int], stale_after_seconds: float
) -> int | None:
    """The newest measured step that every live rank of the newest measured attempt has reached.

    A rank that has been silent for `stale_after_seconds` longer than the freshest holds nobody back. None when
    nothing was measured, or a newer attempt hides that step: the visible points then have to be looked at.
    """
    table = schema.run_latest
    rows = connection.execute(
        select(table).where(table.c.run_id == run_id, table.c.measured_step.is_not(None))
    ).all()
    attempt = max((row.attempt for row in rows), default=0)
    rows = [row for row in rows if row.attempt == attempt]
    if not rows:
        return None
    freshest = max(row.last_report_at for row in rows)
    live = [row for row in rows if row.last_report_at >= freshest - stale_after_seconds]
    step: int = min(row.measured_step for row in live)
    return step if step < bounds.get(attempt, _UNBOUNDED) else None


def measured_state(connection: Connection, run_id: str) -> object:
    """A value that changes whenever the newest measured step of a run may have changed."""
    table, attempt = schema.run_latest, schema.attempt
    places = connection.execute(
        select(table.c.stream_id, table.c.measured_seq, table.c.measured_step, table.c.attempt).where(
            table.c.run_id == run_id, table.c.measured_step.is_not(None)
        )
    ).all()
    launches = connection.execute(
        select(attempt.c.attempt, attempt.c.first_step).where(attempt.c.run_id == run_id)
    ).all()
    return sorted(map(tuple, places)), sorted(map(tuple, launches))
