"""A run's last change beside its last sign of life; what runs are grouped by, and tokens/s, in the table of runs.

Overviews are due again: that fills their new columns.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Create the table, add columns."""
    op.create_table(
        "run_change",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("changed_at", sa.Double, nullable=False),
    )
    op.add_column("run_overview", sa.Column("tokens_per_second", sa.Double))
    op.add_column("run_overview", sa.Column("configuration", sa.String(32)))
    op.execute("UPDATE run_overview SET reports = -1")
