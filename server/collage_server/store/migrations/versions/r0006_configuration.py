"""Which runs are seeds of each other: what a run's configuration says, and what people said of it instead."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0006"
down_revision = "r0005"


def upgrade() -> None:
    """Two empty columns: the next evaluation of a run fills the first where a server of before made the run."""
    op.add_column("run", sa.Column("configuration", sa.String(32)))
    op.add_column("run", sa.Column("treated_as", sa.String(32)))
