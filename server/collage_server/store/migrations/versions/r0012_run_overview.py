"""What is said of each run, a row a run: the table of runs is read from it. It fills itself in the background."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_NUMBERS = (
    "edq_ratio",
    "lost_update_ratio",
    "state_decrement_ratio",
    "loss",
    "validation_loss",
    "bytes_per_parameter",
)


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "run_overview",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("reports", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger),
        *(sa.Column(name, sa.Double) for name in _NUMBERS),
        sa.Column("health", sa.String(32)),
        sa.Column("findings", sa.Text),
        sa.Column("overview", sa.Text, nullable=False),
    )
