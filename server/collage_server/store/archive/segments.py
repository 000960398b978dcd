"""Which archived files there are: a row each, written and removed with what it stands for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, func, insert, select

from collage_server.store import schema

__all__ = ["Segment", "add_segment", "archived_bytes", "remove_segments"]


@dataclass(frozen=True)
class Segment:
    """One archived file of a run: chunks `first_chunk` to `last_chunk` of an attempt at a level."""

    run_id: str
    attempt: int
    level: int
    first_chunk: int
    last_chunk: int
    path: str
    size: int
    footer: bytes


def add_segment(connection: Connection, segment: Segment) -> None:
    """Name a file that is there: from this transaction's end on it is read."""
    values = asdict(segment)
    size = values.pop("size")
    connection.execute(insert(schema.segment).values(**values, bytes=size, has_rows=True))


def remove_segments(connection: Connection, run_id: str, paths: Collection[str], now: float) -> None:
    """Name these files no more: they are removed once every reader that may have seen their rows has ended."""
    table = schema.segment
    if paths:
        connection.execute(
            insert(schema.segment_gone), [{"run_id": run_id, "path": path, "gone_at": now} for path in paths]
        )
        connection.execute(delete(table).where(table.c.run_id == run_id, table.c.path.in_(list(paths))))


def archived_bytes(connection: Connection) -> int:
    """What all archived files take."""
    return int(connection.execute(select(func.coalesce(func.sum(schema.segment.c.bytes), 0))).scalar_one())
