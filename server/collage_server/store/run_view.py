"""What reading and sealing have to know of a run: its streams, what hides what, what has left the journal."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Final

import numpy as np
from sqlalchemy import Connection, select

from collage_server.errors import NotFound
from collage_server.store import schema
from collage_server.store.latest import hidden_from
from collage_server.store.ranges import contains, ranges_from_json
from collage_server.store.streams import read_stream_records

__all__ = ["UNBOUNDED", "RunView"]

UNBOUNDED: Final = 2**62


class RunView:
    """One run, as one transaction sees it."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self.connection = connection
        self.run_id = run_id
        records = read_stream_records(connection, run_id)
        self.streams = {record.stream_id: record for record in records}
        table = schema.attempt
        self.attempts = [
            (row.attempt, row.first_step)
            for row in connection.execute(
                select(table.c.attempt, table.c.first_step).where(table.c.run_id == run_id)
            )
        ]
        self.bounds = hidden_from(self.attempts)
        newest = max((record.attempt for record in records), default=0)
        self.world_size = max((record.world_size for record in records if record.attempt == newest), default=1)
        latest = schema.run_latest
        rows = connection.execute(select(latest.c.stream_id, latest.c.sealed).where(latest.c.run_id == run_id))
        self._sealed = {row.stream_id: ranges_from_json(row.sealed) for row in rows}

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
        table = schema.entry
        rows = self.connection.execute(
            select(table.c.key, table.c.entry).where(table.c.run_id == self.run_id).order_by(table.c.entry)
        )
        return {row.key: row.entry for row in rows}

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
