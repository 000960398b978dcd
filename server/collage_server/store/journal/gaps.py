"""Numbers of reports that a stream gave up, kept as ranges in its row of `run_latest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, select, update

from collage_monitor import wire
from collage_server.store import schema
from collage_server.store.contract import NewEvent, StreamRecord
from collage_server.store.ranges import Ranges, add_ranges, ranges_from_json, ranges_to_json
from collage_server.store.runs.events import add_events

__all__ = ["count_numbers", "record_gaps"]

_MOST_RANGES: Final = 10_000


def record_gaps(connection: Connection, stream: StreamRecord, gaps: Sequence[wire.Gap], now: float) -> None:
    """Add these gaps to the stream's, with an event for new ones; the same gap again changes nothing.

    Beyond the most ranges that are kept, gaps are not recorded and count as missing; no report is refused.
    """
    table = schema.run_latest
    mine = (table.c.run_id == stream.run_id, table.c.stream_id == stream.stream_id)
    known = connection.execute(select(table.c.given_up).where(*mine).with_for_update()).scalar()
    if known is None:
        return
    before = ranges_from_json(known)
    merged = add_ranges(before, [(gap.first_seq, gap.last_seq) for gap in gaps])
    if merged != before and len(merged) <= _MOST_RANGES:
        connection.execute(update(table).where(*mine).values(given_up=ranges_to_json(merged)))
        add_events(connection, stream.run_id, [_event(stream, gaps, before, merged)], now)


def _event(stream: StreamRecord, gaps: Sequence[wire.Gap], before: Ranges, merged: Ranges) -> NewEvent:
    total = count_numbers(merged)
    fresh = total - count_numbers(before)
    reasons = ", ".join(sorted({gap.reason for gap in gaps}))
    return NewEvent(
        origin=f"gap/{stream.stream_id}/{total}",
        kind="gap",
        text=f"{fresh} report{'s' if fresh > 1 else ''} of rank {stream.rank} will never come ({reasons[:500]})",
        attempt=stream.attempt,
    )


def count_numbers(ranges: Ranges) -> int:
    """How many numbers the ranges hold."""
    return sum(last - first + 1 for first, last in ranges)
