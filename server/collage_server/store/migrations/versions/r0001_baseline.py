"""The baseline: a new database is made of `schema` at once; one of the development before it is taken over here."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
import sqlalchemy as sa
from alembic import op

from collage_server.store import schema

revision = "r0001"
down_revision = None

_READABLE: Final = ("measured_point", "layer_point")
_INT: Final = np.dtype("<i8")


def upgrade() -> None:
    """Migrate from the last earlier revision, with its data; duplicated numbers are dropped."""
    # First, and alone: servers lock a run before its other rows.
    op.add_column("run", sa.Column("changed_at", sa.Double))
    op.execute(
        "UPDATE run SET changed_at = (SELECT changed_at FROM run_change WHERE run_change.run_id = run.run_id)"
    )
    for view in ("run_point", "run_layer"):
        op.execute(f"DROP VIEW {view}")
    for table in ("run_change", *_READABLE):
        op.drop_table(table)
    _note_measuring_attempts(op.get_bind())
    _name_contributors(op.get_bind())


def _note_measuring_attempts(connection: sa.Connection) -> None:
    """Attempts that have a stream with statistics hide older ones from their first step on, as before."""
    attempt, stream = schema.attempt, schema.stream
    schema.measured_attempt.create(connection)
    mine = (stream.c.run_id == attempt.c.run_id, stream.c.attempt == attempt.c.attempt)
    measures = sa.exists().where(*mine, stream.c.statistics != "[]")
    begun = sa.select(attempt.c.run_id, attempt.c.attempt, attempt.c.first_step).where(measures)
    columns = ["run_id", "attempt", "measured_from"]
    connection.execute(sa.insert(schema.measured_attempt).from_select(columns, begun))


def _name_contributors(connection: sa.Connection) -> None:
    """Early chunks tell the ranks that contributed, not their streams: the first of each rank is named."""
    stream, chunk = schema.stream, schema.point_chunk
    first: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    columns = (stream.c.run_id, stream.c.attempt, stream.c.rank, stream.c.stream)
    for run_id, attempt, rank, number in connection.execute(sa.select(*columns).order_by(stream.c.stream)):
        first[run_id, attempt].setdefault(rank, number)
    place = (chunk.c.run_id, chunk.c.attempt, chunk.c.level, chunk.c.chunk, chunk.c.part)
    unnamed = sa.select(*place, chunk.c.contributor_ranks).where(
        chunk.c.level == 1, chunk.c.contributor_streams.is_(None)
    )
    for row in connection.execute(unnamed).all():
        ranks = np.frombuffer(row.contributor_ranks, _INT).tolist()
        streams = [first[row.run_id, row.attempt][rank] for rank in ranks]
        mine = (column == value for column, value in zip(place, row[:5], strict=True))
        named = np.array(streams, _INT).tobytes()
        connection.execute(sa.update(chunk).where(*mine).values(contributor_streams=named))
