"""Health of streams: reports given up, and how far an agent's clock is ahead."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add two columns; streams that are there already have given up nothing that is known."""
    op.add_column("run_latest", sa.Column("given_up", sa.Text, nullable=False, server_default="[]"))
    op.add_column("run_latest", sa.Column("clock_skew_seconds", sa.Double))
