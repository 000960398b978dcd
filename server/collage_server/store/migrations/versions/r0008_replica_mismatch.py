"""Where replicas of a tensor were found to differ."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "replica_mismatch",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("layer", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("replicas", sa.Text, nullable=False),
    )
