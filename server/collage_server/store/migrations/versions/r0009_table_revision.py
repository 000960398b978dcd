"""When each overview was made, beside what the table of runs is sorted by: its revision adds them up."""

from __future__ import annotations

from alembic import op

from collage_server.store import schema

revision = "r0009"
down_revision = "r0008"


def upgrade() -> None:
    """The index is made again, with one more column and without one that nobody reads."""
    narrow = schema.run_overview_narrow
    op.drop_index("run_overview_narrow", schema.run_overview.name, if_exists=True)
    narrow.create(op.get_bind())
