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
    for name, kind in (
        ("digest", sa.LargeBinary(32)),
        ("checks", sa.LargeBinary()),
        ("checked_at", sa.Double()),
        ("problem", sa.Text()),
    ):
        op.add_column("segment", sa.Column(name, kind))
    op.create_index("segment_by_check", "segment", ["checked_at"])
    known = sa.column("problem").is_not(None)
    op.create_index("segment_with_problem", "segment", ["run_id"], sqlite_where=known, postgresql_where=known)
