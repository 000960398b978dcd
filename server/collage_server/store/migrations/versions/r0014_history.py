"""Which code made an overview, so that a later release makes it anew; events by age, so that old ones can go."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add the columns and the index; what earlier releases said counts as made by other code."""
    op.add_column("run_overview", sa.Column("made_by", sa.String(64)))
    op.add_column("run_overview", sa.Column("made_at", sa.Double))
    op.create_index("event_by_time", "event", ["time"])
