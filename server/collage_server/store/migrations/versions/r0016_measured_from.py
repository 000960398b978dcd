"""Attempts say from which step on they measure: one that measures nothing hides nothing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Create the table. Attempts that have a stream with statistics measure from their first step on, as before."""
    op.create_table(
        "measured_attempt",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("measured_from", sa.BigInteger, nullable=False),
    )
    op.execute(
        "INSERT INTO measured_attempt SELECT run_id, attempt, first_step FROM attempt WHERE EXISTS (SELECT 1 FROM "
        "stream WHERE stream.run_id = attempt.run_id AND stream.attempt = attempt.attempt "
        "AND stream.statistics <> '[]')"
    )
