"""Which ranks stand in the sealed parts of a chunk, so that a late report never counts twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, select

from collage_server.store import schema
from collage_server.store.contract import IntArray
from collage_server.store.rows import int_array, int_bytes

__all__ = ["Contributors", "pack_contributors", "rank_contributed", "read_contributors"]

Contributors = Mapping[int, frozenset[int]]
"""Step → the ranks whose shards stand in sealed parts."""


def pack_contributors(steps: IntArray, pairs: Iterable[tuple[int, int]]) -> tuple[bytes, bytes]:
    """(contributor_ranks, contributors) of a part from pairs (step, rank); all bits set are left out."""
    known = set(pairs)
    ranks = sorted({rank for _, rank in known})
    table = np.array([[(int(step), rank) in known for rank in ranks] for step in steps], dtype=bool)
    return int_bytes(np.array(ranks, dtype=np.int64)), b"" if table.all() else np.packbits(table).tobytes()


def rank_contributed(
    connection: Connection, run_id: str, attempt: int, chunks: Collection[int], rank: int
) -> dict[tuple[int, int], tuple[NDArray[np.bool_], bool]]:
    """By (chunk, part): at which points the rank contributed, and whether it was the only one to do so."""
    found = {}
    for row in _rows(connection, run_id, attempt, chunks):
        ranks, table = _unpack(row)
        mine = np.flatnonzero(ranks == rank)
        present = table[:, mine[0]] if len(mine) else np.zeros(row.point_count, dtype=bool)
        found[row.chunk, row.part] = (present, ranks.tolist() == [rank])
    return found


def read_contributors(
    connection: Connection, run_id: str, attempt: int, chunks: Collection[int], rank: int | None = None
) -> dict[int, frozenset[int]]:
    """Who contributed to each step of these chunks; of one `rank` alone, where that is given."""
    found: dict[int, frozenset[int]] = {}
    for row in _rows(connection, run_id, attempt, chunks):
        ranks, table = _unpack(row)
        if rank is not None:
            ranks, table = ranks[ranks == rank], table[:, ranks == rank]
        steps = int_array(row.points).reshape(5, row.point_count)[1]
        for step, present in zip(steps.tolist(), table, strict=True):
            found[step] = found.get(step, frozenset()) | frozenset(ranks[present].tolist())
    return found


def _rows(connection: Connection, run_id: str, attempt: int, chunks: Collection[int]) -> Sequence[Row[Any]]:
    if not chunks:
        return []
    table = schema.point_chunk
    return connection.execute(
        select(table).where(
            table.c.run_id == run_id,
            table.c.attempt == attempt,
            table.c.level == 1,
            table.c.chunk.in_(list(chunks)),
        )
    ).all()


def _unpack(row: Row[Any]) -> tuple[IntArray, NDArray[np.bool_]]:
    """(ranks, [points][ranks]) of a part."""
    ranks = int_array(row.contributor_ranks)
    table = np.ones((row.point_count, len(ranks)), dtype=bool)
    if row.contributors:
        bits = np.unpackbits(np.frombuffer(row.contributors, dtype=np.uint8), count=table.size)
        table = bits.reshape(table.shape).astype(bool)
    return ranks, table
