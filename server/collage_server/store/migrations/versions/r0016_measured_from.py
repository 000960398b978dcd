"""Attempts say from which step on they measure: one that measures nothing hides nothing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the column. Attempts that have a stream with statistics measure from their first step on, as before."""
    op.add_column("attempt", sa.Column("measured_from", sa.BigInteger))
    op.execute(
        "UPDATE attempt SET measured_from = first_step WHERE EXISTS (SELECT 1 FROM stream WHERE "
        "stream.run_id = attempt.run_id AND stream.attempt = attempt.attempt AND stream.statistics <> '[]')"
    )
