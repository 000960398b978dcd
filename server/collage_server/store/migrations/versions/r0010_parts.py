"""Chunks say which streams stand in them, not only their ranks; reports say how many parts their step has."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add columns. What is there stays as it is: chunks without streams are read by their ranks, as before."""
    op.add_column("point_chunk", sa.Column("contributor_streams", sa.LargeBinary))
    op.add_column("point_chunk", sa.Column("unfinished", sa.LargeBinary))
    op.add_column("run_latest", sa.Column("unfinished", sa.Text, nullable=False, server_default="{}"))
    parts = sa.Column("parts", sa.Integer, nullable=False, server_default="1")
    if op.get_bind().dialect.name == "sqlite":
        # A column behind the blobs would be reached only through all their pages.
        with op.batch_alter_table("report", recreate="always") as batch:
            batch.add_column(parts, insert_after="layer_count")
    else:
        op.add_column("report", parts)
