"""What reading and sealing know of a run: its streams, which attempts hide which, which reports are sealed.

One view a question and run, from the snapshot's transaction; the rest of `reading/` and sealing only look things up
in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, Final

import numpy as np
from sqlalchemy import ColumnElement, Connection, Row, Select, func, select

from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import statistic
from collage_server.errors import NotFound, Unprocessable
from collage_server.memory_budget import held_rows
from collage_server.store import schema
from collage_server.store.archive.segments import LOGGED
from collage_server.store.chunks.blobs import ChunkInfo, PointRows
from collage_server.store.journal.declarations import unknown_statistics
from collage_server.store.records import UNBOUNDED, first_hidden_steps, stream_record
from collage_server.store.row_checks import require_row, whole_rows
from collage_server.store.row_helpers import among, contains, ranges_from_json, require_runs
from collage_server.store.runs.reported_state import newest_logged_steps
from collage_server.store.runs.run_store import OF_ATTEMPTS, RowsOfRuns, attempts_of_runs, rows_by_run

__all__ = [
    "RunView",
    "RunViews",
    "chosen_layers",
    "is_known",
]

_MOST_NAMES: Final = 500
"""Of layers that a statement asks for one by one; for more, all of the run are read, and kept for the snapshot."""
_STREAM_BYTES: Final = 4096
_NAMES: Final = (0,)
"""The group of columns with the name of a layer."""


class RunView:
    """One run, as one transaction sees it. Its chunks and waiting reports are cached once read."""

    def __init__(self, connection: Connection, run_id: str, rows: RowsOfRuns | None = None) -> None:
        rows = rows or _read(connection, [run_id])
        self.connection = connection
        self.run_id = run_id
        self.latest_rows = rows.streams.get(run_id, [])
        """Its streams with their places in `run_latest`, and the run's `state`."""
        self.streams = {row.stream_id: stream_record(row) for row in self.latest_rows}
        self.attempt_rows = rows.attempts.get(run_id, [])
        self.attempts = [(row.attempt, row.measured_from) for row in self.attempt_rows]
        self.archived = frozenset(row.attempt for row in self.attempt_rows if row.archived is not None)
        """Attempts of which something lies in archived files."""
        self.archived_whole = frozenset(
            row.attempt for row in self.attempt_rows if row.archived is not None and row.archived <= LOGGED
        )
        """Those of which totals of the model do, or logged values."""
        self.first_hidden_steps = first_hidden_steps(self.attempts)
        self.sealed_ranges = {row.stream_id: ranges_from_json(row.sealed) for row in self.latest_rows}
        self.chunk_infos: Sequence[ChunkInfo] | None = None
        self.point_rows: dict[tuple[int, str], PointRows] = {}
        """Points of chunks, by level and chunks."""
        self._prefixes: dict[tuple[str, int], int] = {}
        self.unsealed: dict[type, dict[int, list[Any]]] = {}
        """All reports that wait, by kind of row and attempt."""

    @cached_property
    def world_sizes(self) -> tuple[tuple[int, int], ...]:
        """As in `Points`."""
        sizes: dict[int, int] = {}
        for record in self.streams.values():
            sizes[record.attempt] = max(record.world_size, sizes.get(record.attempt, 1))
        found: list[tuple[int, int]] = []
        for attempt, measured_from in sorted(self.attempts):
            if attempt in sizes and measured_from is not None:
                while found and found[-1][0] >= measured_from:
                    found.pop()
                found.append((measured_from, sizes[attempt]))
        return tuple(found) or ((0, 1),)

    def check_rank(self, rank: int | None) -> None:
        """Raise NotFound unless some stream has this rank; a run without streams has every rank."""
        ranks = {record.rank for record in self.streams.values()}
        if rank is not None and ranks and rank not in ranks:
            raise NotFound(
                f"run {self.run_id!r} has no rank {rank}; its ranks are {min(ranks)} to {max(ranks)}", field="rank"
            )

    def check_only_rank(self, rank: int | None) -> None:
        """Raise Unprocessable unless it is the run's only one: layers are kept with all ranks merged."""
        ranks = {record.rank for record in self.streams.values()}
        if rank is not None and ranks - {rank}:
            raise Unprocessable(
                f"run {self.run_id!r} has {len(ranks)} ranks: its layers are kept with all ranks merged, single "
                "ranks as totals of their whole model; leave rank out, or leave layer, pattern and module_type out",
                field="rank",
            )

    def is_sealed(self, stream_id: str, seq: int) -> bool:
        """Whether this report stands in chunks; its journal row, if still there, is about to go."""
        return contains(self.sealed_ranges.get(stream_id, ()), seq)

    def newest_logged_steps(self) -> dict[tuple[str, str], int]:
        """(stream_id, name) → the newest step, of everything that was logged."""
        return {
            (row.stream_id, name): step
            for row in self.latest_rows
            for name, step in newest_logged_steps(row.scalars).items()
        }

    def ranks(self, attempt: int) -> set[int]:
        """Ranks registered in an attempt."""
        return {record.rank for record in self.streams.values() if record.attempt == attempt}

    def first_hidden_step(self, attempt: int) -> int:
        """The step from which newer attempts hide this one."""
        return self.first_hidden_steps.get(attempt, UNBOUNDED)

    def statistics(self, wanted: Collection[str] | None) -> list[str]:
        """Statistics that some stream declares, in the order declared; only those wanted (None: all that merge)."""
        return [key for key in self._declared if (is_known(key) if wanted is None else key in wanted)]

    @property
    def has_unknown_statistics(self) -> bool:
        """Whether a newer server took statistics that this one cannot merge."""
        dropped = len(unknown_statistics(self._declared))
        return sum(not is_known(key) for key in self._declared) > dropped

    @cached_property
    def _declared(self) -> dict[str, None]:
        return dict.fromkeys(chain.from_iterable(stream.statistics for stream in self.streams.values()))

    def is_contested(self, stream_id: str) -> bool:
        """Whether another process reports as the same rank of the attempt: at a step only one of them counts."""
        stream = self.streams[stream_id]
        return self._processes[stream.attempt, stream.rank] > 1

    @cached_property
    def _processes(self) -> Counter[tuple[int, int]]:
        return Counter((stream.attempt, stream.rank) for stream in self.streams.values())

    @cached_property
    def ranks_by_stream(self) -> dict[int, int]:
        """Rank by number of a stream."""
        return {stream.number: stream.rank for stream in self.streams.values()}

    @cached_property
    def replicated(self) -> bool:
        """Whether some tensor stands on several ranks as replicas."""
        return any(stream.replicas.any() for stream in self.streams.values())

    @cached_property
    def replicas_beside_shards(self) -> bool:
        """Whether some rank holds replicas beside shards of its own: its model vector then cannot be split."""
        return any(len(np.unique(stream.replicas)) > 1 for stream in self.streams.values())

    @cached_property
    def entries(self) -> Mapping[str, int]:
        """The number of each entry that chunks hold, by its key."""
        return _read_entries(self.connection, [self.run_id])[self.run_id]

    @property
    def is_measured(self) -> bool:
        """Whether any stream has sent a measured step."""
        return any(row.measured_step is not None for row in self.latest_rows)

    def prefix(self, stream_id: str, count: int) -> int:
        """The length of the dictionary's beginning that covers the first `count` layers of a stream; 0 for an
        unknown stream."""
        known = self._prefixes.get((stream_id, count))
        if known is None:
            stream = self.streams.get(stream_id)
            known = 0 if stream is None else int(stream.layers[:count].max(initial=-1)) + 1
            self._prefixes[stream_id, count] = known
        return known

    @cached_property
    def layer_count(self) -> int:
        """How many layers the dictionary has: each stands there because some stream declared it."""
        return max((int(stream.layers.max(initial=-1)) + 1 for stream in self.streams.values()), default=0)

    @cached_property
    def layers(self) -> dict[str, int]:
        """The dictionary of layers, in its order."""
        return _layers_of(self.connection, [self.run_id])[self.run_id]


@lru_cache(maxsize=10_000)
def is_known(key: str) -> bool:
    """Whether this server's catalogue has the statistic, so that it can be merged."""
    try:
        statistic(key)
    except CatalogueError:
        return False
    return True


def chosen_layers(
    connection: Connection, views: Mapping[str, RunView], names: Sequence[str] | None
) -> dict[str, dict[str, int]]:
    """Positions of the named layers (None: of all) by run.

    Raises:
        NotFound: a run has no layer of some name.
    """
    if names is None:
        return _all_layers(connection, views)
    many = len(names) > _MOST_NAMES
    found = _all_layers(connection, views) if many else _named_layers(connection, views, names)
    for run_id, held in found.items():
        for name in names:
            if name not in held:
                raise NotFound(
                    f"run {run_id!r} has no layer {name!r}; GET /api/v1/runs/{run_id}/layers lists them",
                    field="layer",
                )
    return {run_id: {name: held[name] for name in names} for run_id, held in found.items()}


def _all_layers(connection: Connection, views: Mapping[str, RunView]) -> dict[str, dict[str, int]]:
    """Those of each run, which its view keeps."""
    unread = [run_id for run_id, view in views.items() if "layers" not in vars(view)]
    for run_id, held in (_layers_of(connection, unread) if unread else {}).items():
        views[run_id].layers = held
    return {run_id: view.layers for run_id, view in views.items()}


def _named_layers(
    connection: Connection, run_ids: Collection[str], names: Sequence[str]
) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {run_id: {} for run_id in run_ids}
    table = schema.layer
    chosen = (table.c.run_id.in_(list(run_ids)), table.c.name.in_(names))
    rows = connection.execute(select(*_names_of_layers()).where(*chosen))
    for row in whole_rows(table, rows, _NAMES):
        found[row.run_id][row.name] = row.layer
    return found


def _layers_of(connection: Connection, run_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {run_id: {} for run_id in run_ids}
    rows = connection.execute(_layers_of_runs(), {"run_ids": run_ids})
    for row in whole_rows(schema.layer, rows, _NAMES):
        found[row.run_id][row.name] = row.layer
    return found


@cache
def _layers_of_runs() -> Select[Any]:
    table = schema.layer
    return select(*_names_of_layers()).where(among(table.c.run_id)).order_by(table.c.layer)


def _names_of_layers() -> list[ColumnElement[Any]]:
    return [schema.layer.c[name] for name in ("run_id", "name", "layer", "checks")]


class RunViews:
    """Views of runs in one transaction, each read once; their dictionaries hold the requested keys."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._views: dict[str, RunView] = {}
        self._known: dict[str, set[str] | None] = {}
        """Keys of the dictionary that were asked for; None: all."""

    def of(self, run_ids: Sequence[str], keys: Collection[str] | None = None) -> dict[str, RunView]:
        """Views in the order given, that know `keys` of the dictionary of what chunks hold (None: all).

        Raises:
            NotFound, Gone: one of the runs is not there.
        """
        ids = list(dict.fromkeys(run_ids))
        if unread := [run_id for run_id in ids if run_id not in self._views]:
            rows = _read(self._connection, unread)
            for run_id in unread:
                view = self._views[run_id] = RunView(self._connection, run_id, rows)
                view.entries, self._known[run_id] = {}, set()
        lacking = [run_id for run_id in ids if not self._knows(run_id, keys)]
        for run_id, entries in (_read_entries(self._connection, lacking, keys) if lacking else {}).items():
            view, known = self._views[run_id], self._known[run_id]
            view.entries = dict(sorted({**view.entries, **entries}.items(), key=itemgetter(1)))
            self._known[run_id] = None if keys is None or known is None else known.union(keys)
        return {run_id: self._views[run_id] for run_id in ids}

    def rows(self, run_ids: Sequence[str]) -> RowsOfRuns | None:
        """The attempts and streams of these runs, if the views of all were read."""
        if not all(run_id in self._views for run_id in run_ids):
            return None
        views = {run_id: self._views[run_id] for run_id in run_ids}
        streams = {run_id: view.latest_rows for run_id, view in views.items()}
        return RowsOfRuns({run_id: view.attempt_rows for run_id, view in views.items()}, streams)

    def _knows(self, run_id: str, keys: Collection[str] | None) -> bool:
        known = self._known[run_id]
        return known is None or (keys is not None and known.issuperset(keys))


def _read(connection: Connection, run_ids: Sequence[str]) -> RowsOfRuns:
    """Streams and attempts of several runs, in as many statements as one takes.

    Raises:
        NotFound, Gone: one of the runs is not there.
    """
    streams: dict[str, list[Row[Any]]] = defaultdict(list)
    rows = connection.execute(_streams_of_runs(), {"run_ids": run_ids})
    for row in held_rows((row, _stream_bytes(row)) for row in whole_rows(schema.stream, rows)):
        require_row(schema.run_latest, row, checks="latest_checks")
        streams[row.run_id].append(row)
    require_runs(connection, [run_id for run_id in run_ids if run_id not in streams])
    return RowsOfRuns(rows_by_run(connection, _attempts_with_files(), run_ids, *OF_ATTEMPTS), streams)


def _stream_bytes(row: Any) -> int:
    """A stream's memory: its numbers twice, and its texts as objects."""
    return _STREAM_BYTES + 4 * (len(row.layers) + len(row.statistics) + len(row.scalars))


@cache
def _streams_of_runs() -> Select[Any]:
    run, stream, latest = schema.run, schema.stream, schema.run_latest
    there = stream.join(run, run.c.run_id == stream.c.run_id).join(
        latest, (latest.c.run_id == stream.c.run_id) & (latest.c.stream_id == stream.c.stream_id)
    )
    places = (column for column in latest.c if column.name not in stream.c)
    checks = latest.c.checks.label("latest_checks")
    streams = select(*stream.c, *places, checks, run.c.state).select_from(there).where(among(stream.c.run_id))
    return streams.order_by(stream.c.stream)


@cache
def _attempts_with_files() -> Select[Any]:
    """The attempts of some runs, and the lowest level of which archived files hold something."""
    segment, attempt = schema.segment, schema.attempt
    same = (segment.c.run_id == attempt.c.run_id, segment.c.attempt == attempt.c.attempt)
    lowest = select(func.min(segment.c.level)).where(*same).correlate(attempt)
    return attempts_of_runs().add_columns(lowest.scalar_subquery().label("archived"))


def _read_entries(
    connection: Connection, run_ids: Sequence[str], keys: Collection[str] | None = None
) -> dict[str, dict[str, int]]:
    """What chunks hold of each run: key → entry, in the order of entries."""
    found: dict[str, dict[str, int]] = {run_id: {} for run_id in run_ids}
    if keys is not None and not keys:
        return found
    given = {"run_ids": list(run_ids)} | ({} if keys is None else {"keys": list(keys)})
    rows = connection.execute(_entries_of(some=keys is not None), given)
    for row in whole_rows(schema.entry, rows):
        found[row.run_id][row.key] = row.entry
    return found


@cache
def _entries_of(*, some: bool) -> Select[Any]:
    """The entries of all keys, or of the given ones."""
    table = schema.entry
    chosen = (among(table.c.run_id), among(table.c.key, "keys")) if some else (among(table.c.run_id),)
    return select(table).where(*chosen).order_by(table.c.entry)
