"""Incidents, silences, and who evaluates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_ID = sa.String(64)
_NAME = sa.String(512)


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "incident",
        sa.Column("incident_id", _ID, primary_key=True),
        sa.Column("open_key", _ID, unique=True),
        sa.Column("run_id", _ID, nullable=False),
        sa.Column("project", _NAME, nullable=False),
        sa.Column("alert", _NAME, nullable=False),
        sa.Column("severity", sa.String(16), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("step", sa.BigInteger),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("resolved_at", sa.Double),
        sa.Column("acknowledged_at", sa.Double),
        sa.Column("acknowledged_by", _ID),
        sa.Column("sent", sa.Text, nullable=False),
        sa.Column("settled", sa.Boolean, nullable=False),
    )
    op.create_index("incident_by_time", "incident", ["started_at", "incident_id"])
    op.create_index("incident_by_run", "incident", ["run_id"])
    op.create_table(
        "silence",
        sa.Column("silence_id", _ID, primary_key=True),
        sa.Column("alert", _NAME),
        sa.Column("project", _NAME),
        sa.Column("run_id", _ID),
        sa.Column("comment", sa.Text, nullable=False),
        sa.Column("made_by", _ID, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("ends_at", sa.Double, nullable=False),
    )
    op.create_table(
        "lease",
        sa.Column("name", _ID, primary_key=True),
        sa.Column("holder", _ID, nullable=False),
        sa.Column("ends_at", sa.Double, nullable=False),
    )
