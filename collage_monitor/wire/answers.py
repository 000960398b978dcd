"""Answers of the server, about runs, their events, tokens and sessions.

Number fields are JSON numbers, "NaN", "Infinity", "-Infinity", or null for undefined.

The server makes them, `client.py` decodes them. A field may be added with a default, none renamed or removed:
clients of another version read them (`docs/api/http.md` is made from them).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from collage_monitor.wire.messages import Attempt, Layer, Name, Stream, WatchInfo
from collage_monitor.wire.number_encoding import Number

__all__ = [
    "AlertLabel",
    "AlertText",
    "AlertmanagerAlert",
    "AlertmanagerAnswer",
    "AlertmanagerMessage",
    "AuditLogEntry",
    "AuditLogPage",
    "AwayDependency",
    "BatchAnswer",
    "Catalogue",
    "ComparedRun",
    "Comparison",
    "DamagedRun",
    "Deleted",
    "ErrorAnswer",
    "ErrorBody",
    "Event",
    "EventKind",
    "EventPage",
    "Grant",
    "Health",
    "Heatmap",
    "Histogram",
    "Latest",
    "LayerList",
    "LoggedScalar",
    "ROLES",
    "RejectedReport",
    "Role",
    "Run",
    "RunDescription",
    "RunFacts",
    "RunPage",
    "RunState",
    "RunSummary",
    "Series",
    "StreamList",
    "Token",
    "TokenCreate",
    "TokenCreated",
    "TokenList",
    "WorstLayer",
]

Values = list[Number | None]


class ErrorBody(Struct, kw_only=True, frozen=True):
    """Why a request was refused: `field` names the offending field, `limit` the bound it exceeds."""

    code: str
    message: str
    field: str | None = None
    limit: float | None = None
    request_id: str | None = None


class ErrorAnswer(Struct, kw_only=True, frozen=True):
    """The shape of every error answer."""

    error: ErrorBody


class RejectedReport(Struct, kw_only=True, frozen=True):
    """A refused report of a batch; the others were kept. `index` is its place in the batch."""

    index: int
    seq: int | None
    code: str
    message: str
    field: str | None = None
    limit: float | None = None


class BatchAnswer(Struct, kw_only=True, frozen=True):
    """The outcome of a batch, sent after the commit: accepted + duplicates + rejected = reports sent."""

    accepted: int
    duplicates: int
    rejected: list[RejectedReport] = field(default_factory=list)


class LoggedScalar(Struct, kw_only=True, frozen=True):
    """The newest value of a logged scalar."""

    step: int
    value: Number


class WorstLayer(Struct, kw_only=True, frozen=True):
    """A layer among the worst in a metric."""

    layer: str
    metric: str
    value: Number | None


RunState = Literal["running", "finished", "failed", "stale"]
"""A run that is stale has not ended, but is silent for `stale_after_seconds`."""


class RunFacts(Struct, kw_only=True, frozen=True):
    """The facts that every answer about a run has."""

    run_id: str
    name: str
    state: RunState
    last_step: int | None
    scalars: dict[str, LoggedScalar]


class RunDescription(RunFacts, kw_only=True, frozen=True):
    """A run as people described it, with the times and names of `Run`."""

    project: str
    group: str | None
    tags: list[str]
    notes: str
    created_at: float
    updated_at: float
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    changed_at: float | None = None
    beside: list[str] = field(default_factory=list)


class Run(RunDescription, kw_only=True, frozen=True):
    """A run with its newest numbers. `state` "stale": not ended, but silent for `stale_after_seconds`.

    `updated_at`: the training's last sign of life, a launch, a state that was stated or a report. `changed_at`:
    when a request last changed state, name, group, tags or notes; null if none did. `beside`: the names in
    `scalars` that second writers log; attempts and steps are the training's.
    """

    first_step: int | None
    attempts: list[Attempt]
    watch: WatchInfo | None
    latest: dict[str, Number | None]


class DamagedRun(Struct, kw_only=True, frozen=True):
    """A run that a page cannot show, since its rows are damaged; `message` says which, and what to do."""

    run_id: str
    message: str


class RunPage(Struct, kw_only=True, frozen=True):
    """A page of runs, newest first; `cursor` gets the next page, null if there is none. `damaged`: runs of the page
    that cannot be shown."""

    runs: list[Run]
    cursor: str | None
    damaged: list[DamagedRun] = field(default_factory=list)


class LayerList(Struct, kw_only=True, frozen=True):
    """The run's layers, in the order first seen."""

    run_id: str
    layers: list[Layer]


class StreamList(Struct, kw_only=True, frozen=True):
    """The run's streams, by attempt and rank."""

    run_id: str
    streams: list[Stream]


class Series(Struct, kw_only=True, frozen=True):
    """One metric or scalar over the run; all lists have equal length.

    Point i merges the measured steps first_steps[i] … steps[i]. `positions` is its place on the requested axis
    (step, tokens, or seconds since the run's first report). `minimum` and `maximum` are those of the single steps
    inside the point, null where many layers were merged over too many steps to read each one. `low` and `high` are
    the 95 % interval of the merged value, if the metric has one.
    `ranks` counts the ranks that reported the point; fewer than `expected_ranks`, those of its attempt, is a
    partial point. `world_size` counts the ranks of the newest attempt.
    `cursor`, if requested, gets what comes later. If the next answer `continues`, append its points to those of
    this one; otherwise its points replace them. `more` holds the series of further metrics, if several were asked.
    """

    run_id: str
    metric: str
    layer: str | None
    axis: Literal["step", "tokens", "time"]
    first_steps: list[int]
    steps: list[int]
    positions: Values
    values: Values
    minimum: Values
    maximum: Values
    low: Values | None = None
    high: Values | None = None
    ranks: list[int] | None = None
    world_size: int | None = None
    expected_ranks: list[int] | None = None
    cursor: str | None = None
    continues: bool = False
    more: dict[str, Series] | UnsetType = UNSET


class Heatmap(Struct, kw_only=True, frozen=True):
    """A metric over layers and steps: values[layer][point]; `positions` places the points on the axis."""

    run_id: str
    metric: str
    layers: list[str]
    first_steps: list[int]
    steps: list[int]
    values: list[Values]
    axis: Literal["step", "tokens", "time"] = "step"
    positions: Values = field(default_factory=list)


class Histogram(Struct, kw_only=True, frozen=True):
    """A merged histogram: counts[i] elements in bin labels[i] ("underflow", "-24" … "7", "overflow")."""

    run_id: str
    name: str
    layer: str | None
    first_step: int | None
    step: int | None
    labels: list[str]
    counts: Values


class RunSummary(RunFacts, kw_only=True, frozen=True):
    """A compared run without its curve: its metrics merged over all measured steps, and its last scalars.

    `mean_scalars` are means over the last 20 logged values. `reports` counts the stored reports.
    """

    strategy: str | None
    dtype: str | None
    reports: int
    merged: dict[str, Number | None]
    mean_scalars: dict[str, Number]


class ComparedRun(RunSummary, kw_only=True, frozen=True):
    """A compared run with its curve."""

    series: Series


class Comparison(Struct, kw_only=True, frozen=True):
    """Several runs, compared on one metric and axis."""

    metric: str
    axis: Literal["step", "tokens", "time"]
    runs: list[ComparedRun]


class Latest(Struct, kw_only=True, frozen=True):
    """The newest measured step of a run: the model's metrics, the last scalars, the worst three layers by EDQ."""

    run_id: str
    step: int | None
    time: float | None
    model: dict[str, Number | None]
    scalars: dict[str, LoggedScalar]
    worst: list[WorstLayer]


class Catalogue(Struct, kw_only=True, frozen=True):
    """All metrics, statistics, reserved scalars and strategies, as plain objects."""

    metrics: list[dict[str, Any]]
    statistics: list[dict[str, Any]]
    scalars: list[dict[str, Any]]
    strategies: list[dict[str, Any]]


class Deleted(Struct, kw_only=True, frozen=True):
    """A deleted run: its id answers 410 from now on."""

    run_id: str


class AwayDependency(Struct, kw_only=True, frozen=True):
    """Something that the server depends on, and since when it does not answer (Unix seconds)."""

    name: str
    since: float


class Health(Struct, kw_only=True, frozen=True):
    """The server's state: `status` is "ok", or says what is wrong."""

    status: str
    version: str
    away: list[AwayDependency] = []


EventKind = Literal[
    "attempt",
    "conversion",
    "expectation",
    "kept_otherwise",
    "resume_loss",
    "continuation",
    "rank_twice",
    "gap",
    "reports_dropped",
    "skipped_steps",
    "replica_mismatch",
    "unknown_statistics",
    "restored",
    "retention",
    "alert",
    "alert_resolved",
    "note",
]
AlertLabel = Annotated[str, Meta(max_length=512)]
AlertText = Annotated[str, Meta(max_length=4096)]


class Event(Struct, kw_only=True, frozen=True):
    """Something that happened to a run. `event` counts from 1 within the run, in the order of the server's clock.

    `attempt`: the job was launched. `conversion`: weights without residuals got residuals, which began empty.
    `expectation`: the training does not keep what was expected.
    `kept_otherwise`: weights or states are kept in another way than in the launch before.
    `resume_loss`: a resume lost part of an optimizer's state.
    `continuation`: whether a launch began bit-identical to what an earlier one saved.
    `rank_twice`: a second process reported for a rank of the same launch; only
    the first is shown. `gap`: reports were dropped for good. `reports_dropped`, `skipped_steps`: a rank's count
    reached 1, 2, 4, 8 … `replica_mismatch`: ranks that should hold the same weights do not. `unknown_statistics`:
    the server lacks statistics that a stream declares, and drops their totals. `restored`: the server's data are
    those of a back-up. `retention`: fine points expired. `alert`, `alert_resolved`: by this server's evaluation or
    Alertmanager. `note`: written by a person; its text begins with the token used. `step` is null if unknown;
    `layers` names the layers concerned, eight at most.
    """

    event: int
    time: float
    kind: EventKind
    text: str
    attempt: int | None = None
    step: int | None = None
    layers: list[str] = field(default_factory=list)


class EventPage(Struct, kw_only=True, frozen=True):
    """A run's events, oldest first. `cursor` gets what comes after them, even if there are none yet.

    `left_out` counts the matching events beyond the limit: newer ones, or with `newest` older ones.
    """

    run_id: str
    events: list[Event]
    cursor: int
    left_out: int = 0


class AlertmanagerAlert(Struct, frozen=True, rename="camel"):
    """One alert of a notification. Its label `run_id`, set by `/metrics`, names the run."""

    status: Literal["firing", "resolved"]
    labels: Annotated[dict[AlertLabel, AlertText], Meta(max_length=64)]
    annotations: Annotated[dict[AlertLabel, AlertText], Meta(max_length=64)] = field(default_factory=dict)
    starts_at: Annotated[str, Meta(max_length=64)] = ""
    fingerprint: Annotated[str, Meta(max_length=64)] = ""


class AlertmanagerMessage(Struct, frozen=True, rename="camel"):
    """Alertmanager's webhook, version 4; fields not needed here are ignored."""

    alerts: Annotated[list[AlertmanagerAlert], Meta(max_length=1000)]


class AlertmanagerAnswer(Struct, kw_only=True, frozen=True):
    """The outcome of the alerts: `stored` as events, already `known`, or `ignored` (about no run of this token)."""

    stored: int
    known: int
    ignored: int


Role = Literal["ingest", "read", "operate", "admin"]
"""What a token allows: sending; reading; both, and deleting; everything, tokens included."""
ROLES: Final[tuple[Role, ...]] = ("ingest", "read", "operate", "admin")


class TokenCreate(Struct, kw_only=True, frozen=True):
    """Make a token. `projects` None means every project, present and future; an admin token is always for all."""

    name: Name
    role: Role
    projects: Annotated[list[Name], Meta(min_length=1, max_length=100)] | None


class Grant(Struct, kw_only=True, frozen=True):
    """A role within some projects; `projects` None is every one."""

    role: Role
    projects: list[str] | None = None


class Token(Struct, kw_only=True, frozen=True):
    """A token without its secret. Times are Unix seconds; `last_used_at` is exact to about a minute.

    A session of a person has a `subject`, the provider's id of that person. It ends at `expires_at`, and once it
    was not used for `idle_seconds`. It grants `role` within `projects`, and the roles in `also`.
    """

    token_id: str
    name: str
    role: Role
    projects: list[str] | None
    created_at: float
    created_by: str
    last_used_at: float | None = None
    revoked_at: float | None = None
    also: list[Grant] = field(default_factory=list)
    subject: str | None = None
    expires_at: float | None = None
    idle_seconds: float | None = None


class TokenCreated(Struct, kw_only=True, frozen=True):
    """A new token with its secret, which is shown only here and stored nowhere."""

    token: Token
    secret: str


class TokenList(Struct, kw_only=True, frozen=True):
    """Every token, newest first, revoked ones included."""

    tokens: list[Token]


class AuditLogEntry(Struct, kw_only=True, frozen=True):
    """What somebody did that the audit log keeps: a token made or revoked, a session begun or ended, a run deleted
    or restored.

    `actor` is a token_id, "server-token", "loopback", "host:USER" or "oidc-provider", `client` the address that
    asked.
    """

    act_id: str
    time: float
    actor: str
    action: str
    subject: str
    project: str | None = None
    request_id: str | None = None
    client: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


class AuditLogPage(Struct, kw_only=True, frozen=True):
    """A page of the audit log, newest first: its entries are `acts`, `cursor` is that of the next page. `damaged`
    says which entries of the page cannot be read."""

    acts: list[AuditLogEntry]
    cursor: str | None = None
    damaged: list[str] = field(default_factory=list)
