"""Chunks: what the sealer makes of the journal."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ID = sa.String(64)
_NAME = sa.String(512)


def _key(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in names]


def upgrade() -> None:
    """Create the tables of chunks; reports sealed so far: none."""
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
    )
    op.create_table(
        "layer_chunk",
        sa.Column("run_id", _ID, primary_key=True),
        *_key("attempt", "level", "entry", "chunk", "part"),
        sa.Column("point_count", sa.Integer, nullable=False),
        sa.Column("layer_count", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "scalar_chunk",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("stream_id", _ID, primary_key=True),
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("point_count", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
