"""Sessions of people among the tokens, and the log-out tokens that ended some."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from collage_server.store import server_tables

revision = "r0003"
down_revision = "r0002"


def upgrade() -> None:
    """Columns that are empty for every existing token, and an empty table."""
    for name in ("also", "subject", "provider_session", "expires_at", "idle_seconds"):
        kind = server_tables.token.c[name].type
        op.add_column("token", sa.Column(name, kind))
    server_tables.log_out.create(op.get_bind())
