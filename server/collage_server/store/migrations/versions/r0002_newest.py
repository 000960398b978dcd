"""The newest measured step of each run, kept a row a run: servers write it for each run they find without one."""

from __future__ import annotations

from alembic import op

from collage_server.store import schema

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    """An empty table."""
    schema.run_newest.create(op.get_bind())
