"""Checksums of rows, and digests of archived files. Rows and files that are there have none: they are null."""

import sqlalchemy as sa
from alembic import op

revision = "r0012"
down_revision = "r0011"


def upgrade() -> None:
    """Add the columns; servers of the previous release do not name them."""
    for table in ("report", "point_chunk", "model_chunk", "layer_chunk", "scalar_chunk"):
        op.add_column(table, sa.Column("checks", sa.LargeBinary))
    op.add_column("report", sa.Column("step_check", sa.BigInteger))
    op.add_column("segment", sa.Column("digest", sa.LargeBinary(32)))
