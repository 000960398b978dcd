"""The newest measured step of each run, a row a run, which servers write; and how long a lease was taken for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from collage_server.store import schema

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    """An empty table, and a column: leases of before are void."""
    schema.run_newest.create(op.get_bind())
    op.add_column("lease", sa.Column("seconds", sa.Double, nullable=False, server_default="0"))
