"""Events: what happened to a run. Each attempt that is already stored gets one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_ID = sa.String(64)
_NAME = sa.String(512)


def upgrade() -> None:
    """Create the table, and an event a launch, in the order of the launches."""
    op.create_table(
        "event",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("event", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("origin", _NAME, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer),
        sa.Column("step", sa.BigInteger),
        sa.Column("layers", sa.Text, nullable=False),
        sa.UniqueConstraint("run_id", "origin"),
    )
    op.execute(
        "INSERT INTO event (run_id, event, origin, time, kind, text, attempt, step, layers) "
        "SELECT run_id, attempt, 'attempt/' || attempt, created_at, 'attempt', "
        "'attempt ' || attempt || ' began at step ' || first_step, attempt, first_step, '[]' FROM attempt"
    )
