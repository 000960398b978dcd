"""Questions to a store and its answers, whatever database is behind it.

`Store` and its parts take and give these; routes, ingest and queries know nothing else of the store. Add a field
freely: these are values in one process, never stored or sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row

from collage_monitor import wire
from collage_monitor.wire.answers import RunDescription, RunState
from collage_server.store.row_helpers import from_json, int_array

__all__ = [
    "CLOCK_SLACK_SECONDS",
    "CONNECTIONS",
    "FloatArray",
    "GroupOutcome",
    "GroupQuery",
    "IncidentQuery",
    "IntArray",
    "LatestPoint",
    "NewEvent",
    "NewIncident",
    "Points",
    "READERS",
    "ROW_BYTES",
    "ReportGroup",
    "ReportedState",
    "RunFilter",
    "RunPageRecord",
    "RunQuery",
    "RunRecord",
    "RunRevision",
    "SCALAR_BYTES",
    "ScalarPoints",
    "Selection",
    "Sizes",
    "StreamRecord",
    "TableQuery",
    "UNBOUNDED",
    "first_hidden_steps",
    "report_bytes",
    "state_at",
    "stream_record",
]

CONNECTIONS: Final = 40
"""What one store opens to its database at most."""
READERS: Final = 32
"""How many threads may ask a store at once: the other connections are for writing, sealing and upkeep."""

CLOCK_SLACK_SECONDS: Final = 5.0
"""What is dated further in the future was written by a clock that was ahead."""
UNBOUNDED: Final = 2**62
"""Later than any step."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StreamRecord:
    """A registered stream, its `number` counted within the run.

    `layers` are positions in the run's dictionary, `replicas` stand beside them.
    """

    run_id: str
    stream_id: str
    number: int
    attempt: int
    rank: int
    world_size: int
    process_id: int
    statistics: tuple[str, ...]
    layers: IntArray
    replicas: IntArray
    watch: wire.WatchInfo | None = None


@dataclass(frozen=True, eq=False)
class ReportGroup:
    """The acceptable reports of one request, all of one stream."""

    stream: StreamRecord
    reports: Sequence[wire.Report]
    body_bytes: int = 0

    @cached_property
    def journal_bytes(self) -> list[int]:
        """Each report's share of the journal's bounds."""
        return [report_bytes(report) for report in self.reports]


ROW_BYTES: Final = 1024
"""What a report is taken to cost besides what it holds: many small ones are slow to read, too."""
SCALAR_BYTES: Final = 32
"""What a logged value takes beside its text when it is read: seq, step, time and value as numbers."""
_TEXT_BYTES: Final = 24
"""Beside a logged value's name: quotes, colon, comma, and the digits of a float."""


def report_bytes(report: wire.Report) -> int:
    """A report's share of the journal's bounds; scalars count as text, approximately, and as numbers."""
    scalars = sum(map(len, report.scalars)) + (_TEXT_BYTES + SCALAR_BYTES) * len(report.scalars)
    return ROW_BYTES + scalars + len(report.model or b"") + len(report.statistics or b"")


@dataclass(frozen=True)
class GroupOutcome:
    """The outcome of a group, known after the commit. `gone`: the run was deleted, nothing was stored.

    `accepted_bytes`: what the accepted reports take of the journal's bounds.

    `late` and `too_many_names` are positions in the group, refused and not stored: totals of steps at or before
    `frozen_step`, and logs under more names than a stream may have.
    """

    accepted: int
    duplicates: int
    accepted_bytes: int = 0
    gone: bool = False
    late: tuple[int, ...] = ()
    too_many_names: tuple[int, ...] = ()
    frozen_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """A filter of runs; None does not filter.

    `projects` are those that the caller may see. `q` is searched in names, ids, projects, groups, tags and notes.
    """

    project: str | None = None
    projects: Collection[str] | None = None
    strategy: str | None = None
    group: str | None = None
    tag: str | None = None
    state: str | None = None
    q: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunQuery(RunFilter):
    """A page of the run list, newest first."""

    cursor: str | None = None
    limit: int = 100


@dataclass(frozen=True, kw_only=True)
class TableQuery(RunFilter):
    """A part of the table of runs, in its order; `where`: conditions as `column_condition` reads them."""

    health: str | None = None
    run_ids: Collection[str] | None = None
    where: Sequence[str] = ()
    sort: str = "updated_at"
    descending: bool = True
    offset: int = 0
    limit: int = 50


@dataclass(frozen=True, kw_only=True)
class GroupQuery(TableQuery):
    """A part of the table of runs in groups; `opened` are the keys of those whose runs are shown."""

    by: wire.GroupBy
    opened: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class ReportedState:
    """A summary of the reports of a run's streams, over all its ranks, with times by the server's clock.

    `last_step` is the newest step at which something is seen, `last_attempt` the newest that has reported; None if
    none has. All fields are the training's, except `reports` and `scalars`: `beside` lists the names in these that
    second writers log.
    """

    attempts: list[wire.Attempt]
    first_step: int | None
    last_step: int | None
    last_attempt: int | None
    first_time: float | None
    last_report_at: float | None
    reports: int
    reports_dropped: float | None
    scalars: dict[str, wire.LoggedScalar]
    beside: list[str] = field(default_factory=list)


class RunRecord(RunDescription, kw_only=True, frozen=True):
    """A run as it is stored, its times by the server's clock; never stale.

    `changed_at` is also the last drop of coarse points by retention. `attempts` to `reports_dropped` as in
    `ReportedState`, `configuration` and `treated_as` as in `schema.run`.
    """

    attempts: list[wire.Attempt]
    first_step: int | None
    last_attempt: int | None
    first_time: float | None
    last_report_at: float | None
    reports: int
    reports_dropped: float | None
    strategy: str | None
    dtype: str | None
    configuration: str
    treated_as: str | None
    watch: wire.WatchInfo | None


@dataclass(frozen=True)
class RunRevision:
    """A revision: it changes whenever anything that readers see of a run changes. `updated_at` as in `RunRecord`.

    `launched_at` is `updated_at` with reports left out: a clock that lags behind the newest report's must not hide
    a launch. `frozen_step` is how far retention has taken fine points, `streams` how many there are.
    """

    state: str
    updated_at: float
    launched_at: float
    changed_at: float | None
    reports: int
    attempts: tuple[tuple[int, int | None], ...]
    strategy: str | None
    dtype: str | None
    streams: int
    frozen_step: int | None


@dataclass(frozen=True)
class RunPageRecord:
    """A page of runs, newest first, those of the page that cannot be read, and the cursor of the next page."""

    runs: list[RunRecord]
    cursor: str | None
    damaged: list[wire.DamagedRun]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A selection of points of a run: which steps, of what, and how fine.

    Both ends are inclusive, None is open. `rank` None merges all ranks. Without `by_layer` totals are those of the
    whole model; with it those of each of `layers` (None: of all). `points` is how many are wanted at most: points
    that are merged already may then stand for several measured ones, never so many that fewer than half of those
    wanted are left. `extremes_of` names metrics whose extremes over the single steps are needed beside them. `at`
    has the one step that is read of each run, in place of first and last.
    """

    rank: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    points: int | None = None
    by_layer: bool = False
    layers: tuple[str, ...] | None = None
    extremes_of: tuple[str, ...] = ()
    at: Mapping[str, int] | None = None

    def of(self, run_id: str) -> Selection:
        """The data read for one run."""
        return self if self.at is None else replace(self, first_step=self.at[run_id], last_step=self.at[run_id])


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Points of a run, oldest first, ranks merged. A point merges `counts` measured steps, `first_steps` … `steps`.

    `times` (Unix seconds), `ranks` (the fewest that reported one of its steps) and all others have shape [points];
    each total has [points] for the model, [points, layers] where `layers` names them. NaN is "not reported".
    `extremes`: metric → (minimum, maximum) of it over the single steps of each point, where points merge several.
    `world_sizes`: (first step, ranks) of each attempt that newer ones have not hidden, in order.
    """

    first_steps: IntArray
    steps: IntArray
    times: FloatArray
    ranks: IntArray
    counts: IntArray
    totals: dict[str, FloatArray]
    world_sizes: tuple[tuple[int, int], ...] = ((0, 1),)
    extremes: dict[str, tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ScalarPoints:
    """One logged name over a run, oldest first: one value a step, the mean where several ranks logged it."""

    steps: IntArray
    times: FloatArray
    values: FloatArray

    @classmethod
    def empty(cls) -> ScalarPoints:
        """A name that was never logged."""
        return cls(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))


@dataclass(frozen=True, eq=False)
class LatestPoint:
    """The newest measured step of a run, with the model's totals (0-dimensional)."""

    step: int
    time: float
    model: dict[str, FloatArray]


@dataclass(frozen=True, kw_only=True)
class NewEvent:
    """An event to add to a run. `origin` identifies its cause within the run: the same origin is stored once."""

    origin: str
    kind: wire.EventKind
    text: str
    attempt: int | None = None
    step: int | None = None
    layers: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class NewIncident:
    """An alert that begins to fire. `labels` tell its series; `run_id` and `project` are "" for the server."""

    alert: str
    severity: str
    source: wire.IncidentSource
    labels: Mapping[str, str]
    text: str
    started_at: float
    run_id: str = ""
    project: str = ""
    value: float | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class IncidentQuery:
    """Filters of the incidents; None does not filter. `projects` are those that the caller may see."""

    project: str | None = None
    projects: Collection[str] | None = None
    run_id: str | None = None
    alert: str | None = None
    severity: str | None = None
    state: wire.IncidentState | None = None
    cursor: str | None = None
    limit: int = 100


@dataclass(frozen=True)
class Sizes:
    """What the database takes now, what its disk has left (None: another machine's business), archived files."""

    used_bytes: int
    free_bytes: int | None
    archived_bytes: int = 0


def state_at(state: str, updated_at: float, now: float, stale_after_seconds: float) -> RunState:
    """The stored state; a running run without a sign of life for too long is stale."""
    if state == "finished":
        return "finished"
    if state == "failed":
        return "failed"
    return "running" if updated_at >= now - stale_after_seconds else "stale"


def first_hidden_steps(attempts: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """Attempt → the step from which newer attempts hide it, from pairs (attempt, the step from which it hides).

    None: it hides nothing. Second writers' launches (below 0) hide none and are hidden by none: they are left out.
    """
    first_hidden = {}
    bound = UNBOUNDED
    for attempt, begin in sorted(attempts, key=itemgetter(0), reverse=True):
        if attempt < 0:
            break
        first_hidden[attempt] = bound
        bound = bound if begin is None else min(bound, begin)
    return first_hidden


def stream_record(row: Row[Any]) -> StreamRecord:
    """The record behind a row of `stream`."""
    return StreamRecord(
        run_id=row.run_id,
        stream_id=row.stream_id,
        attempt=row.attempt,
        rank=row.rank,
        world_size=row.world_size,
        process_id=row.process_id,
        number=row.stream,
        statistics=tuple(from_json(row.statistics)),
        layers=int_array(row.layers),
        replicas=int_array(row.replicas),
        watch=None if row.watch is None else msgspec.json.decode(row.watch, type=wire.WatchInfo),
    )
