"""Tokens, the audit log, and an index of runs by project."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_ID = sa.String(64)
_NAME = sa.String(512)


def upgrade() -> None:
    """Add what access control needs; nothing that is there changes."""
    op.create_table(
        "token",
        sa.Column("token_id", _ID, primary_key=True),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("projects", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", _ID, nullable=False),
        sa.Column("last_used_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "act",
        sa.Column("act_id", _ID, primary_key=True),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("actor", _ID, nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", _NAME, nullable=False),
        sa.Column("project", _NAME),
        sa.Column("request_id", _ID),
        sa.Column("details", sa.Text, nullable=False),
    )
    op.create_index("act_by_time", "act", ["time", "act_id"])
    op.create_index("run_by_project", "run", ["project"])
