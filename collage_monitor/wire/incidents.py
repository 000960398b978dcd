"""Incidents and silences: alerts that fired on a server, who takes care of them, and silences.

`api/incidents.py` of the server answers with them; the dashboard, `alerts` and `on_alert` read them. A field may be
added with a default, none renamed (`docs/api/http.md` is made from them).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from collage_monitor.wire.answers import AlertLabel, AlertText
from collage_monitor.wire.number_encoding import Number

__all__ = [
    "Incident",
    "IncidentPage",
    "IncidentSource",
    "IncidentState",
    "NoteCreate",
    "Silence",
    "SilenceCreate",
    "SilenceList",
    "TriedTarget",
    "TriedTargetList",
]

IncidentState = Literal["firing", "resolved"]
IncidentSource = Literal["server", "alertmanager"]


class Incident(Struct, kw_only=True, frozen=True):
    """One alert on one run, or on the server (`run_id` and `project` are null), from when it fired until it ended.

    `alert` is its name in the catalogue; `source` says who noticed first, this server or Alertmanager. `text` gives
    the reason: what the catalogue says, the judgement of the run's recent past, and since when it changed. `value`
    is the condition's when it fired, `step` the run's then. `silenced`: no message about it is sent now.
    """

    incident_id: str
    alert: str
    severity: str
    source: IncidentSource
    state: IncidentState
    text: str
    started_at: float
    resolved_at: float | None = None
    acknowledged_at: float | None = None
    acknowledged_by: str | None = None
    run_id: str | None = None
    project: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    value: Number | None = None
    step: int | None = None
    silenced: bool = False


class IncidentPage(Struct, kw_only=True, frozen=True):
    """Incidents, newest first; `cursor` gets those before them, null at the end."""

    events: list[Incident]
    cursor: str | None = None


class NoteCreate(Struct, kw_only=True, frozen=True):
    """Write into a run's timeline; `step`: the step that the note is about, if there is one."""

    text: Annotated[str, Meta(min_length=1, max_length=2000)]
    step: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class SilenceCreate(Struct, kw_only=True, frozen=True):
    """Send nothing about incidents that match all fields stated here, for `seconds`."""

    seconds: Annotated[float, Meta(gt=0, le=31_536_000)]
    alert: AlertLabel | None = None
    project: AlertLabel | None = None
    run_id: Annotated[str, Meta(max_length=64)] | None = None
    comment: AlertText = ""


class Silence(Struct, kw_only=True, frozen=True):
    """A silence that was made, by whom, and until when it holds."""

    silence_id: str
    alert: str | None
    project: str | None
    run_id: str | None
    comment: str
    made_by: str
    made_at: float
    ends_at: float


class SilenceList(Struct, kw_only=True, frozen=True):
    """The silences that hold now, newest first."""

    silences: list[Silence]


class TriedTarget(Struct, kw_only=True, frozen=True):
    """A target of messages, and why it took none: the kind of error, null if it took the message."""

    target: str
    problem: str | None = None


class TriedTargetList(Struct, kw_only=True, frozen=True):
    """Every target that the server's settings name, after one message to each."""

    targets: list[TriedTarget]
