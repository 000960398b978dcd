"""What a store offers, whatever database is behind it; one test suite runs unchanged over every backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_server.store.access.contract import AccessStore
from collage_server.store.quota import QuotaCheck

__all__ = [
    "CONNECTIONS",
    "EventStore",
    "GroupOutcome",
    "LatestPoint",
    "NewEvent",
    "PointStore",
    "Points",
    "READERS",
    "ReportGroup",
    "ReportJournal",
    "Retention",
    "RunPageRecord",
    "RunQuery",
    "RunRecord",
    "RunRevision",
    "RunStore",
    "ScalarPoints",
    "SealLimits",
    "Sealing",
    "Selection",
    "Sizes",
    "Snapshot",
    "Store",
    "StreamRecord",
    "StreamStore",
]

CONNECTIONS: Final = 40
"""What one store opens to its database at most."""
READERS: Final = 32
"""How many threads may ask a store at once: the other connections are for writing, sealing and upkeep."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StreamRecord:
    """A registered stream. `layers` are positions in the run's dictionary, `replicas` stand beside them."""

    run_id: str
    stream_id: str
    stream: int
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
    bytes: int = 0


@dataclass(frozen=True)
class GroupOutcome:
    """What became of a group, known after the commit. `gone`: the run was deleted, nothing was stored.

    `late` are positions in the group whose totals belong to steps at or before `frozen_step`, `crowded` those that
    log under more names than a stream may: refused, not stored.
    """

    accepted: int
    duplicates: int
    gone: bool = False
    late: tuple[int, ...] = ()
    crowded: tuple[int, ...] = ()
    frozen_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunQuery:
    """Filters of the run list; None does not filter. `projects` are those that the asker may see."""

    project: str | None = None
    projects: Collection[str] | None = None
    strategy: str | None = None
    group: str | None = None
    tag: str | None = None
    state: str | None = None
    q: str | None = None
    cursor: str | None = None
    limit: int = 100


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as it is stored. `updated_at` is the later of its last change and its last report (server's clock)."""

    run_id: str
    project: str
    name: str
    group: str | None
    tags: list[str]
    notes: str
    seed: int | None
    config: dict[str, object]
    state: str
    strategy: str | None
    dtype: str | None
    created_at: float
    updated_at: float
    first_step: int | None
    last_step: int | None
    first_time: float | None
    last_report_at: float | None
    reports: int
    reports_dropped: float | None
    attempts: list[wire.Attempt]
    watch: wire.WatchInfo | None
    scalars: dict[str, wire.LoggedScalar]


@dataclass(frozen=True)
class RunRevision:
    """What changes whenever something that readers see of a run changes. `updated_at` as in `RunRecord`.

    `changed_at` is the last change alone: a clock that lags behind the newest report's must not hide it.
    `frozen_step` is how far retention has taken single points, `streams` how many there are.
    """

    state: str
    updated_at: float
    changed_at: float
    reports: int
    attempts: tuple[tuple[int, int], ...]
    strategy: str | None
    dtype: str | None
    streams: int
    frozen_step: int | None


@dataclass(frozen=True)
class RunPageRecord:
    """A page of runs, newest first, and the cursor of the next page."""

    runs: list[RunRecord]
    cursor: str | None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which points of a run are read, of what, and how fine.

    Both ends are inclusive, None is open. `rank` None merges all ranks. Without `by_layer` totals are those of the
    whole model; with it those of each of `layers` (None: of all). `points` is how many are wanted at most: points
    that are merged already may then stand for several measured ones, never so many that fewer than half of those
    wanted are left. `extremes_of` names metrics whose extremes over the single steps are needed beside them.
    """

    rank: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    points: int | None = None
    by_layer: bool = False
    layers: tuple[str, ...] | None = None
    extremes_of: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Points of a run, oldest first, ranks merged. A point merges `counts` measured steps, `first_steps` … `steps`.

    `times` (Unix seconds), `ranks` (the fewest that reported one of its steps) and all others have shape [points];
    each total has [points] for the model, [points, layers] where `layers` names them. NaN is "not reported".
    `extremes`: metric → (minimum, maximum) of it over the single steps of each point, where points merge several.
    """

    first_steps: IntArray
    steps: IntArray
    times: FloatArray
    ranks: IntArray
    counts: IntArray
    world_size: int
    totals: dict[str, FloatArray]
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
    """Something to tell of a run. `origin` names what it comes from within the run: the same one is told once."""

    origin: str
    kind: wire.EventKind
    text: str
    attempt: int | None = None
    step: int | None = None
    layers: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class SealLimits:
    """When the journal becomes chunks of `points` measured points: by `part_points`, or earlier by bytes or rows.
    The journal's bound for a run must be larger than `bytes`.

    `slice_rows` and `slice_bytes` bound what one write transaction holds, `delete_rows` and `delete_bytes` what one
    removes from the journal, so that acknowledgements do not wait; `coarse_bytes` what is read at once of a whole
    chunk to make its coarse levels.
    """

    points: int = 256
    part_points: int = 64
    bytes: int = 32 * 2**20
    rows: int = 8192
    late_rows: int = 64
    slice_rows: int = 6
    slice_bytes: int = 2**19
    delete_rows: int = 64
    delete_bytes: int = 2**22
    coarse_bytes: int = 2**25

    def scaled_to_commits(self, commit_bytes: int) -> SealLimits:
        """Limits for commits of so many bytes: slices a quarter as large, if that is more than now.

        Each slice waits for a commit: with small slices between large commits, sealing would fall behind.
        """
        factor = max(1, commit_bytes // (4 * self.slice_bytes))
        return replace(
            self,
            slice_rows=factor * self.slice_rows,
            slice_bytes=factor * self.slice_bytes,
            delete_rows=factor * self.delete_rows,
            delete_bytes=factor * self.delete_bytes,
        )


@dataclass(frozen=True)
class Sizes:
    """What the data takes now, and what the disk has left (None: another machine's business)."""

    used_bytes: int
    free_bytes: int | None


class RunStore(Protocol):
    """Runs: created, listed, changed, deleted."""

    def create(
        self, project: str, create: wire.RunCreate, now: float, check: QuotaCheck | None = None
    ) -> tuple[RunRecord, bool]:
        """Create a run or resume it; says if it is new. `check` may refuse what the project would then hold."""

    def page(self, query: RunQuery, now: float, stale_after_seconds: float) -> RunPageRecord:
        """A page of runs, newest first."""

    def get(self, run_id: str) -> RunRecord:
        """One run."""

    def records(self, run_ids: Sequence[str]) -> dict[str, RunRecord]:
        """Several runs, in the order given."""

    def revisions(self, run_ids: Sequence[str]) -> dict[str, RunRevision]:
        """The revision of each of these runs, in the order given."""

    def update(self, run_id: str, update: wire.RunUpdate, now: float, check: QuotaCheck | None = None) -> RunRecord:
        """Change a run. `check` may refuse what its project would then hold."""

    def delete(self, run_id: str, now: float, acts: Sequence[wire.Act] = ()) -> None:
        """Delete a run and leave a tombstone, and these acts in the audit log."""


class StreamStore(Protocol):
    """Attempts, streams, and the layers that they have declared."""

    def create_attempt(self, run_id: str, create: wire.AttemptCreate, now: float) -> wire.Attempt:
        """Register a launch; the same launch_id is the same attempt."""

    def create(self, run_id: str, create: wire.StreamCreate, now: float) -> wire.Stream:
        """Register a stream, or extend it."""

    def of_run(self, run_id: str) -> list[wire.Stream]:
        """The run's streams, by attempt and rank."""

    def record(self, stream_id: str) -> StreamRecord:
        """What ingest has to know of a stream."""

    def layers(self, run_id: str) -> list[wire.Layer]:
        """The run's layers in the order in which they were first seen; `elements` counts the whole tensor."""


class ReportJournal(Protocol):
    """Reports as they come in, each one once, until they are sealed. `append`: from one thread at a time."""

    def append(self, groups: Sequence[ReportGroup], now: float) -> list[GroupOutcome]:
        """Store all groups in one transaction; durable when it returns."""

    def record_gaps(self, stream: StreamRecord, gaps: Sequence[wire.Gap], now: float) -> None:
        """Keep which reports of a stream will never come; the same gap twice is one."""

    def runs(self) -> list[str]:
        """Runs that have reports in the journal."""

    def bytes_of(self, run_id: str) -> int:
        """What the run's reports in the journal take of its bounds."""


class EventStore(Protocol):
    """What happened to runs."""

    def add(self, run_id: str, events: Sequence[NewEvent], now: float) -> int:
        """Add to what happened to a run; how many of these were new."""

    def read(self, run_id: str, after: int, limit: int) -> list[wire.Event]:
        """What happened to a run, oldest first: events numbered above `after`."""


class Snapshot(Protocol):
    """Runs as they stood at one moment: whatever is asked of it fits together."""

    def records(self, run_ids: Sequence[str]) -> dict[str, RunRecord]:
        """Several runs, in the order given."""

    def streams(self, run_id: str) -> list[wire.Stream]:
        """The run's streams, by attempt and rank."""

    def layers(self, run_id: str) -> list[wire.Layer]:
        """The run's layers, as `StreamStore.layers` has them."""

    def events(self, run_id: str, after: int, limit: int) -> list[wire.Event]:
        """What happened to a run, as `EventStore.read` has it."""

    def points(
        self, run_ids: Sequence[str], keys: Collection[str] | None, selection: Selection
    ) -> dict[str, Points]:
        """Totals of each run, only those of `keys` (None: all), in the order given; all runs are read together.

        By layer several runs are read together only where the selection names the layers.
        """

    def scalars(
        self, run_ids: Sequence[str], names: Collection[str] | None, selection: Selection
    ) -> dict[str, dict[str, ScalarPoints]]:
        """Logged values by run and name, only `names` (None: all)."""

    def newest_scalars(self, run_ids: Sequence[str], count: int) -> dict[str, dict[str, FloatArray]]:
        """The last `count` logged values by run and name, oldest first."""

    def latest(self, run_id: str) -> LatestPoint | None:
        """The newest measured step that is whole, None before the first."""


class PointStore(Protocol):
    """Points and logged values: every question is answered from one snapshot."""

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """Runs as they are at this moment, to be asked several things while the context lasts."""


class Sealing(Protocol):
    """From the journal to chunks."""

    def seal(self, run_id: str, now: float, *, pressed: bool = False) -> int:
        """Turn some of the run's journal into parts of chunks; how many, 0 when nothing was due.

        `pressed`: there is no room for more, so all of it is due, whoever is waited for.
        """

    def replica_mismatches(self) -> int:
        """At how many layers and steps replicas differed, over all runs."""


class Retention(Protocol):
    """How data leaves the store. Every call takes short transactions, and may be cut off anywhere without harm."""

    def sealed_runs(self) -> list[str]:
        """Runs that have chunks."""

    def expire(self, run_id: str, before: Mapping[int, float]) -> int:
        """Drop levels of chunks that ended before a moment (level → Unix seconds); how many went."""

    def purge(self, slices: int) -> bool:
        """Remove rows of deleted runs, `slices` transactions at most; True if there may be more."""


class Store(Protocol):
    """Keeps runs and reports, in one object for each thing that changes together.

    Every method of theirs may be called from any thread. Unknown ids raise NotFound, deleted runs Gone,
    contradictions Conflict. Times are Unix seconds.
    """

    @property
    def access(self) -> AccessStore:
        """Tokens, the audit log, and whose a run is."""

    @property
    def runs(self) -> RunStore:
        """Runs."""

    @property
    def streams(self) -> StreamStore:
        """Attempts, streams and layers."""

    @property
    def journal(self) -> ReportJournal:
        """The way in for reports."""

    @property
    def events(self) -> EventStore:
        """What happened to runs."""

    @property
    def points(self) -> PointStore:
        """The way out for numbers."""

    @property
    def sealing(self) -> Sealing:
        """From the journal to chunks."""

    @property
    def retention(self) -> Retention:
        """Old points and deleted runs."""

    def sizes(self) -> Sizes:
        """How much space there is."""

    def checkpoint_log(self) -> None:
        """Keep the database's log short, whoever reads."""

    def release_space(self) -> bool:
        """Give a slice of free space back to the disk; True if there is more."""

    def open(self) -> None:
        """Open the database and bring its schema up to date."""

    def close(self) -> None:
        """Give everything back; nothing acknowledged is pending by then."""

    def check(self) -> None:
        """Raise if the database does not answer."""
