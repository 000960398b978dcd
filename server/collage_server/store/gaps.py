"""Numbers of reports that a stream gave up, kept as ranges beside its newest place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, select, update

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.store import schema
from collage_server.store.ranges import Ranges, add_ranges, ranges_from_json, ranges_to_json

__all__ = ["count_numbers", "note_gaps"]

_MOST_RANGES: Final = 10_000


def note_gaps(connection: Connection, run_id: str, stream_id: str, gaps: Sequence[wire.Gap]) -> None:
    """Add these gaps to the stream's; the same gap again changes nothing.

    Raises:
        Unprocessable: so many separate gaps that they cannot be kept.
    """
    table = schema.run_latest
    mine = (table.c.run_id == run_id, table.c.stream_id == stream_id)
    known = connection.execute(select(table.c.given_up).where(*mine).with_for_update()).scalar()
    if known is None:
        return
    merged = add_ranges(ranges_from_json(known), [(gap.first_seq, gap.last_seq) for gap in gaps])
    if len(merged) > _MOST_RANGES:
        raise Unprocessable(
            f"gaps: {len(merged)} separate ones in stream {stream_id!r}, at most {_MOST_RANGES}; "
            "start a new stream",
            field="gaps",
            limit=_MOST_RANGES,
        )
    connection.execute(update(table).where(*mine).values(given_up=ranges_to_json(merged)))


def count_numbers(ranges: Ranges) -> int:
    """How many numbers the ranges hold."""
    return sum(last - first + 1 for first, last in ranges)
