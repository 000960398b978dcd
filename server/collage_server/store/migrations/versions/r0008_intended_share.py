"""How much is still intended of a run, beside what was usual: alerts read it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0008"
down_revision = "r0007"


def upgrade() -> None:
    """An empty column: the next evaluation of a run fills it."""
    op.add_column("run_overview", sa.Column("intended_share", sa.Double))
