"""Events of a run, and Alertmanager's webhook, which adds events."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

__all__ = ["AlertmanagerAlert", "AlertmanagerAnswer", "AlertmanagerMessage", "Event", "EventKind", "EventPage"]

EventKind = Literal[
    "attempt",
    "rank_twice",
    "gap",
    "reports_dropped",
    "skipped_steps",
    "replica_mismatch",
    "retention",
    "alert",
    "alert_resolved",
]
Label = Annotated[str, Meta(max_length=512)]
Value = Annotated[str, Meta(max_length=4096)]


class Event(Struct, kw_only=True, frozen=True):
    """Something that happened to a run. `event` counts from 1 within the run, in the order of the server's clock.

    `attempt`: the job was launched. `rank_twice`: a second process reported for a rank of the same launch; only
    the first is shown. `gap`: reports were dropped for good. `reports_dropped`, `skipped_steps`: a rank's count
    reached 1, 2, 4, 8 … `replica_mismatch`: ranks that should hold the same weights do not. `retention`: fine
    points expired. `alert`, `alert_resolved`: sent by Alertmanager. `step` is null if unknown; `layers` names
    the layers concerned, eight at most.
    """

    event: int
    time: float
    kind: EventKind
    text: str
    attempt: int | None = None
    step: int | None = None
    layers: list[str] = field(default_factory=list)


class EventPage(Struct, kw_only=True, frozen=True):
    """A run's events, oldest first. `cursor` gets what comes after them, even if there are none yet."""

    run_id: str
    events: list[Event]
    cursor: int


class AlertmanagerAlert(Struct, frozen=True, rename="camel"):
    """One alert of a notification. Its label `run_id`, set by `/metrics`, names the run."""

    status: Literal["firing", "resolved"]
    labels: dict[Label, Value]
    annotations: dict[Label, Value] = field(default_factory=dict)
    starts_at: Annotated[str, Meta(max_length=64)] = ""
    fingerprint: Annotated[str, Meta(max_length=64)] = ""


class AlertmanagerMessage(Struct, frozen=True, rename="camel"):
    """Alertmanager's webhook, version 4; fields not needed here are ignored."""

    alerts: Annotated[list[AlertmanagerAlert], Meta(max_length=1000)]


class AlertmanagerAnswer(Struct, kw_only=True, frozen=True):
    """What became of the alerts: `stored` as events, already `known`, or `ignored` (about no run of this token)."""

    stored: int
    known: int
    ignored: int
