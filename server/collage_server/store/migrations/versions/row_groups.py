"""Checksums of the rows that tell of runs. Those that are there have none, until they are changed."""

import sqlalchemy as sa
from alembic import op

revision = "r0013"
down_revision = "r0012"


def upgrade() -> None:
    """Add the columns; servers of the previous release do not name them."""
    for table in (
        *("run", "run_tag", "attempt", "measured_attempt", "layer", "stream", "run_latest", "entry", "event"),
    ):
        op.add_column(table, sa.Column("checks", sa.LargeBinary))
