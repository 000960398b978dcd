"""When the newest step of a run was written, where r0002 ran before that was kept; else it is there already."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0004"
down_revision = "r0003"


def upgrade() -> None:
    """Existing rows count as old, and are rewritten."""
    known = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("run_newest")}
    if "made_at" not in known:
        op.add_column("run_newest", sa.Column("made_at", sa.Double, nullable=False, server_default="0"))
