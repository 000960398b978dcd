"""A run and its newest measured step, the health of its streams, and alerts as its events.

Pure: records of the store in, `wire.Run` and its neighbours out. Every route that shows a run makes it here, so
that all agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeVar

import msgspec

from collage_monitor import wire
from collage_monitor.wire.answers import RunFacts, RunState
from collage_server.store import NewestPoint
from collage_server.store.records import NewEvent, NewIncident, RunRecord, state_at
from collage_server.store.runs.configurations import entries

__all__ = [
    "alert_event",
    "latest_answer",
    "new_incident",
    "run_answer",
    "run_row",
    "said_of",
    "state_of",
    "with_lag",
    "with_short_labels",
]

_Facts = TypeVar("_Facts", bound=RunFacts)
_MOST_BESIDE: Final = 8
"""Of a row: a role may log any number of names."""
_ROW_SCALARS: Final = ("loss", "validation_loss", "bytes_per_parameter", "tokens_per_second")


def state_of(record: RunRecord, now: float, stale_after_seconds: float) -> RunState:
    """The run's state at this moment."""
    return state_at(record.state, record.updated_at, now, stale_after_seconds)


def said_of(kind: type[_Facts], record: RunRecord, **computed: Any) -> _Facts:
    """The message of this kind: what is computed, and the rest as the record has it."""
    stored = (name for name in kind.__struct_fields__ if name not in computed)
    return kind(**computed, **{name: getattr(record, name) for name in stored})


def latest_answer(record: RunRecord, point: NewestPoint | None) -> wire.Latest:
    """The newest measured step and the newest scalars."""
    return wire.Latest(
        run_id=record.run_id,
        step=None if point is None else point.step,
        time=None if point is None else point.time,
        model={} if point is None else point.model,
        scalars=record.scalars,
        worst=[] if point is None else point.worst,
    )


def run_answer(record: RunRecord, point: NewestPoint | None, now: float, stale_after_seconds: float) -> wire.Run:
    """The run with the metrics of its newest measured step."""
    state = state_of(record, now, stale_after_seconds)
    return said_of(wire.Run, record, state=state, latest={} if point is None else point.model)


def run_row(
    record: RunRecord,
    overview: wire.Overview | None,
    now: float,
    stale_after_seconds: float,
    config: Collection[str] = (),
) -> wire.RunRow:
    """The run as a row of the table of runs, with these entries of its configuration."""
    launched = [attempt.measured_from for attempt in record.attempts if attempt.measured_from is not None]
    known = entries(record.config) if config else {}
    return said_of(
        wire.RunRow,
        record,
        state=state_of(record, now, stale_after_seconds),
        observed_strategy=record.watch.observed_strategy if record.watch else None,
        scalars={name: record.scalars[name] for name in _ROW_SCALARS if name in record.scalars},
        overview=overview,
        trained=record.watch.trained if record.watch else [],
        configuration=record.treated_as or record.configuration,
        is_treated=record.treated_as is not None,
        config={name: known[name] for name in config if name in known},
        resumed_at=launched[1:],
        beside=record.beside[:_MOST_BESIDE],
    )


def with_lag(streams: Sequence[wire.Stream]) -> list[wire.Stream]:
    """The streams with their `lag_steps` behind the furthest of their attempt."""
    furthest: dict[int, int] = {}
    for stream in streams:
        if stream.last_step is not None:
            furthest[stream.attempt] = max(furthest.get(stream.attempt, 0), stream.last_step)
    return [
        msgspec.structs.replace(
            stream,
            lag_steps=None if stream.last_step is None else furthest[stream.attempt] - stream.last_step,
        )
        for stream in streams
    ]


_MOST_CHARACTERS: Final = 1000


def alert_event(alert: wire.AlertmanagerAlert) -> NewEvent:
    """The event of one alert. Sent again in the same state (Alertmanager repeats itself) it has the same origin."""
    name = alert.labels.get("alertname", "alert")
    said = alert.annotations.get("summary") or alert.annotations.get("description") or ""
    severity = alert.labels.get("severity")
    text = f"{name} {alert.status}" + (f" ({severity})" if severity else "") + (f": {said}" if said else "")
    identity = (
        alert.fingerprint or hashlib.blake2b(repr(sorted(alert.labels.items())).encode(), digest_size=8).hexdigest()
    )
    return NewEvent(
        origin=f"alert/{identity}/{alert.starts_at}/{alert.status}",
        kind="alert" if alert.status == "firing" else "alert_resolved",
        text=text[:_MOST_CHARACTERS],
    )


def with_short_labels(alert: wire.AlertmanagerAlert) -> wire.AlertmanagerAlert:
    """No value of a label longer than the longest of this server's own: a list of incidents holds all of them."""
    most = wire.LIMITS["name_characters"]
    return msgspec.structs.replace(alert, labels={name: value[:most] for name, value in alert.labels.items()})


def new_incident(alert: wire.AlertmanagerAlert, project: str, now: float, step: int | None = None) -> NewIncident:
    """The incident of an alert that Alertmanager says is firing; `step`: the run's now."""
    return NewIncident(
        alert=alert.labels.get("alertname", "alert"),
        severity=alert.labels.get("severity", "warning")[:16],
        source="alertmanager",
        labels=alert.labels,
        text=(alert.annotations.get("summary") or alert.annotations.get("description") or "")[:_MOST_CHARACTERS],
        started_at=now,
        run_id=alert.labels.get("run_id", ""),
        project=project,
        step=step,
    )
