"""Which streams contributed to the sealed parts of a chunk, so that a late report never counts twice.

They are columns of `schema.point_chunk`, packed and read here alone: another form of them needs a migration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, select

from collage_server.store import schema
from collage_server.store.chunks.blobs import unpack_points
from collage_server.store.records import IntArray
from collage_server.store.row_checks import require_points
from collage_server.store.row_helpers import int_array, int_bytes

__all__ = [
    "Contributors",
    "StepReports",
    "pack_contributors",
    "rank_contributed",
    "read_contributors",
    "unfinished_steps",
]


class StepReports(NamedTuple):
    """How many reports of a step a stream has sent, of how many there are."""

    received: int
    expected: int

    @property
    def whole(self) -> bool:
        """Whether nothing of the step is missing."""
        return self.received >= self.expected

    def plus(self, other: StepReports) -> StepReports:
        """Both counts together: what was received adds up, and the larger expectation stays."""
        return StepReports(self.received + other.received, max(self.expected, other.expected))


_WHOLE = StepReports(1, 1)
Contributors = Mapping[int, Mapping[int, StepReports]]
"""Step → stream → how many of its reports are sealed."""


def pack_contributors(
    steps: IntArray, counts: Mapping[tuple[int, int], StepReports], ranks: Mapping[int, int]
) -> dict[str, bytes]:
    """Columns of a part from its counts by (step, stream); `ranks` by stream. A table of ones is stored as
    empty."""
    streams = sorted({stream for _, stream in counts})
    table = np.array([[(int(step), stream) in counts for stream in streams] for step in steps], dtype=bool)
    missing = [(*place, *entry) for place, entry in sorted(counts.items()) if not entry.whole]
    return {
        "contributor_ranks": int_bytes(np.array([ranks[stream] for stream in streams], dtype=np.int64)),
        "contributor_streams": int_bytes(np.array(streams, dtype=np.int64)),
        "contributors": b"" if table.all() else np.packbits(table).tobytes(),
        "unfinished": int_bytes(np.array(missing, dtype=np.int64)),
    }


def rank_contributed(
    connection: Connection, run_id: str, attempt: int, chunks: Collection[int], rank: int
) -> dict[tuple[int, int], tuple[NDArray[np.bool_], bool]]:
    """By (chunk, part): at which points the rank contributed, and whether it was the only one to do so."""
    found = {}
    for row in _rows(connection, run_id, attempt, chunks):
        ranks, table = _unpack(row)
        present: NDArray[np.bool_] = np.logical_or.reduce(table[:, ranks == rank], axis=1)
        found[row.chunk, row.part] = (present, set(ranks.tolist()) == {rank})
    return found


def read_contributors(
    connection: Connection,
    run_id: str,
    attempt: int,
    chunks: Collection[int],
    rank: int | None = None,
) -> dict[int, dict[int, StepReports]]:
    """Which streams contributed to each step of these chunks; of one `rank` alone, where given."""
    found: dict[int, dict[int, StepReports]] = defaultdict(dict)
    for row in _rows(connection, run_id, attempt, chunks):
        ranks, table = _unpack(row)
        numbers = int_array(row.contributor_streams)
        unfinished = _unfinished(row)
        steps = unpack_points(row.points, row.point_count)[1]
        chosen = np.flatnonzero((ranks == rank) | (rank is None))
        for step, present in zip(steps.tolist(), table[:, chosen], strict=True):
            for number in numbers[chosen[present]].tolist():
                count = unfinished.get((step, number), _WHOLE)
                known = found[step].get(number)
                found[step][number] = count if known is None else known.plus(count)
    return found


def unfinished_steps(
    connection: Connection,
    run_id: str,
    attempt: int,
    chunks: Collection[int],
    rank: int,
) -> list[int]:
    """Steps of these chunks of which reports from the rank are missing."""
    if not any(row.unfinished for row in _rows(connection, run_id, attempt, chunks)):
        return []
    found = read_contributors(connection, run_id, attempt, chunks, rank)
    return [step for step, counts in found.items() if not all(count.whole for count in counts.values())]


def _unfinished(row: Row[Any]) -> dict[tuple[int, int], StepReports]:
    """By (step, stream), the counts of a part that are not whole; stored as rows of four integers."""
    rows = int_array(row.unfinished or b"").reshape(-1, 4).tolist()
    return {(step, stream): StepReports(received, expected) for step, stream, received, expected in rows}


def _rows(connection: Connection, run_id: str, attempt: int, chunks: Collection[int]) -> Sequence[Row[Any]]:
    if not chunks:
        return []
    table = schema.point_chunk
    rows = connection.execute(
        select(table).where(
            table.c.run_id == run_id,
            table.c.attempt == attempt,
            table.c.level == 1,
            table.c.chunk.in_(list(chunks)),
        )
    ).all()
    for row in rows:
        require_points(row, contributors=True)
    return rows


def _unpack(row: Row[Any]) -> tuple[IntArray, NDArray[np.bool_]]:
    """(ranks [streams], whether a stream contributed [points][streams]) of a part. The rank of each stream: a rank
    with two processes appears twice."""
    ranks = int_array(row.contributor_ranks)
    table = np.ones((row.point_count, len(ranks)), dtype=bool)
    if row.contributors:
        bits = np.unpackbits(np.frombuffer(row.contributors, dtype=np.uint8), count=table.size)
        table = bits.reshape(table.shape).astype(bool)
    return ranks, table
