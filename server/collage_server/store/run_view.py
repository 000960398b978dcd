"""What reading and sealing have to know of a run: its streams, what hides what, what has left the journal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from sqlalchemy import Connection, select

from collage_server.errors import NotFound
from collage_server.store import schema
from collage_server.store.contract import StreamRecord
from collage_server.store.latest import hidden_from
from collage_server.store.ranges import contains, ranges_from_json
from collage_server.store.streams import read_stream_records

__all__ = ["UNBOUNDED", "RunView", "read_views"]

UNBOUNDED: Final = 2**62


@dataclass(frozen=True)
class _Rows:
    """What the database holds of a run's streams and attempts."""

    streams: list[StreamRecord] = field(default_factory=list)
    attempts: list[tuple[int, int]] = field(default_factory=list)
    sealed: dict[str, str] = field(default_factory=dict)


class RunView:
    """One run, as one transaction sees it."""

    def __init__(self, connection: Connection, run_id: str, rows: _Rows | None = None) -> None:
        rows = rows or _read(connection, [run_id])[run_id]
        self.connection = connection
        self.run_id = run_id
        self.streams = {record.stream_id: record for record in rows.streams}
        self.attempts = rows.attempts
        self.bounds = hidden_from(self.attempts)
        newest = max((record.attempt for record in rows.streams), default=0)
        sizes = (record.world_size for record in rows.streams if record.attempt == newest)
        self.world_size = max(sizes, default=1)
        self._sealed = {stream_id: ranges_from_json(text) for stream_id, text in rows.sealed.items()}

    def check_rank(self, rank: int | None) -> None:
        """Raise NotFound unless some stream has this rank; a run without streams has every rank."""
        ranks = {record.rank for record in self.streams.values()}
        if rank is not None and ranks and rank not in ranks:
            raise NotFound(
                f"run {self.run_id!r} has no rank {rank}; its ranks are {min(ranks)} to {max(ranks)}", field="rank"
            )

    def sealed(self, stream_id: str, seq: int) -> bool:
        """Whether this report stands in chunks; its journal row, if still there, is about to go."""
        return contains(self._sealed.get(stream_id, ()), seq)

    def ranks(self, attempt: int) -> set[int]:
        """Ranks registered in an attempt."""
        return {record.rank for record in self.streams.values() if record.attempt == attempt}

    def bound(self, attempt: int) -> int:
        """The step from which newer attempts hide this one."""
        return self.bounds.get(attempt, UNBOUNDED)

    def statistics(self, wanted: Collection[str] | None) -> list[str]:
        """Statistics that some stream declares, in the order declared, only those wanted."""
        declared = dict.fromkeys(key for stream in self.streams.values() for key in stream.statistics)
        return [key for key in declared if wanted is None or key in wanted]

    @cached_property
    def replicated(self) -> bool:
        """Whether some tensor stands on several ranks as replicas."""
        return any(stream.replicas.any() for stream in self.streams.values())

    @cached_property
    def mixed(self) -> bool:
        """Whether some rank holds replicas beside shards of its own: its model vector then cannot be split."""
        return any(len(np.unique(stream.replicas)) > 1 for stream in self.streams.values())

    @cached_property
    def entries(self) -> dict[str, int]:
        """The dictionary of what chunks hold."""
        return _read_entries(self.connection, [self.run_id])[self.run_id]

    @cached_property
    def layers(self) -> dict[str, int]:
        """The dictionary of layers, in its order."""
        table = schema.layer
        rows = self.connection.execute(
            select(table.c.name, table.c.layer).where(table.c.run_id == self.run_id).order_by(table.c.layer)
        )
        return {row.name: row.layer for row in rows}

    def chosen_layers(self, names: Collection[str] | None) -> dict[str, int]:
        """Positions of the named layers (None: of all).

        Raises:
            NotFound: the run has no layer of some name.
        """
        if names is None:
            return self.layers
        for name in names:
            if name not in self.layers:
                raise NotFound(
                    f"run {self.run_id!r} has no layer {name!r}; GET /api/v1/runs/{self.run_id}/layers lists them",
                    field="layer",
                )
        return {name: self.layers[name] for name in names}


def read_views(connection: Connection, run_ids: Sequence[str]) -> dict[str, RunView]:
    """Views of several runs, in the order given, in as many statements as one takes.

    Raises:
        NotFound, Gone: one of the runs is not there.
    """
    ids = list(dict.fromkeys(run_ids))
    entries = _read_entries(connection, ids)
    views = {run_id: RunView(connection, run_id, rows) for run_id, rows in _read(connection, ids).items()}
    for run_id, view in views.items():
        view.entries = entries[run_id]
    return views


def _read(connection: Connection, run_ids: Sequence[str]) -> dict[str, _Rows]:
    found = {run_id: _Rows(streams=records) for run_id, records in read_stream_records(connection, run_ids).items()}
    table, latest = schema.attempt, schema.run_latest
    columns = (table.c.run_id, table.c.attempt, table.c.first_step)
    for run_id, attempt, first_step in connection.execute(select(*columns).where(table.c.run_id.in_(run_ids))):
        found[run_id].attempts.append((attempt, first_step))
    sealed = select(latest.c.run_id, latest.c.stream_id, latest.c.sealed).where(latest.c.run_id.in_(run_ids))
    for run_id, stream_id, text in connection.execute(sealed):
        found[run_id].sealed[stream_id] = text
    return found


def _read_entries(connection: Connection, run_ids: Sequence[str]) -> Mapping[str, dict[str, int]]:
    table = schema.entry
    found: dict[str, dict[str, int]] = defaultdict(dict)
    columns = (table.c.run_id, table.c.key, table.c.entry)
    statement = select(*columns).where(table.c.run_id.in_(run_ids)).order_by(table.c.run_id, table.c.entry)
    for run_id, key, entry in connection.execute(statement):
        found[run_id][key] = entry
    return found
