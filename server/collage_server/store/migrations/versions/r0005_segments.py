"""Archived files, and those that are no longer named."""

from __future__ import annotations

from alembic import op

from collage_server.store import schema

revision = "r0005"
down_revision = "r0004"


def upgrade() -> None:
    """Two empty tables."""
    schema.segment.create(op.get_bind())
    schema.segment_gone.create(op.get_bind())
