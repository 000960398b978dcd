"""Chunks: what the sealer makes of the journal."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ID = sa.String(64)
_NAME = sa.String(512)
_PARTITIONS = 8
_BY_RUN = "HASH (run_id)"


def _key(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in names]


def upgrade() -> None:
    """Create the tables of chunks; reports sealed so far: none."""
    _create_tables()
    if op.get_bind().dialect.name == "postgresql":
        _for_postgresql()


def _for_postgresql() -> None:
    """Partitions by run, and blobs stored uncompressed: a slice of one is then read without the rest."""
    for table in ("point_chunk", "model_chunk", "layer_chunk", "scalar_chunk"):
        column = "points" if table == "point_chunk" else "data"
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
        for number in range(_PARTITIONS):
            op.execute(
                f"CREATE TABLE {table}_{number} PARTITION OF {table} "
                f"FOR VALUES WITH (MODULUS {_PARTITIONS}, REMAINDER {number})"
            )
    for column in ("model", "statistics"):
        op.execute(f"ALTER TABLE report ALTER COLUMN {column} SET STORAGE EXTERNAL")


def _create_tables() -> None:
    op.create_table("seal_claim", sa.Column("run_id", _ID, primary_key=True))
    op.add_column("run_latest", sa.Column("sealed", sa.Text, nullable=False, server_default="[]"))
    op.create_table(
        "entry",
        sa.Column("run_id", _ID, primary_key=True),
        *_key("entry"),
        sa.Column("key", _NAME, nullable=False),
        sa.UniqueConstraint("run_id", "key"),
    )
    op.create_table(
        "point_chunk",
        sa.Column("run_id", _ID, primary_key=True),
        *_key("attempt", "level", "chunk", "part"),
        sa.Column("point_count", sa.Integer, nullable=False),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("points", sa.LargeBinary, nullable=False),
        sa.Column("contributor_ranks", sa.LargeBinary, nullable=False),
        sa.Column("contributors", sa.LargeBinary, nullable=False),
        postgresql_partition_by=_BY_RUN,
    )
    op.create_table(
        "model_chunk",
        sa.Column("run_id", _ID, primary_key=True),
        *_key("attempt", "level"),
        sa.Column("rank", sa.BigInteger, primary_key=True, autoincrement=False),
        *_key("chunk", "part"),
        sa.Column("point_count", sa.Integer, nullable=False),
        sa.Column("entries", sa.LargeBinary, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        postgresql_partition_by=_BY_RUN,
    )
    op.create_table(
        "layer_chunk",
        sa.Column("run_id", _ID, primary_key=True),
        *_key("attempt", "level", "entry", "chunk", "part"),
        sa.Column("point_count", sa.Integer, nullable=False),
        sa.Column("layer_count", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        postgresql_partition_by=_BY_RUN,
    )
    op.create_table(
        "scalar_chunk",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("stream_id", _ID, primary_key=True),
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("point_count", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        postgresql_partition_by=_BY_RUN,
    )
