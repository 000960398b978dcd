"""Views of the table of runs that people saved."""

from __future__ import annotations

from alembic import op

from collage_server.store import server_tables

revision = "r0007"
down_revision = "r0006"


def upgrade() -> None:
    """An empty table."""
    server_tables.saved_view.create(op.get_bind())
