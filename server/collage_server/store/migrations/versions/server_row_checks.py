"""Checksums of the rows of the server itself, and of summaries. Rows that are there have none until they change."""

import sqlalchemy as sa
from alembic import op

revision = "r0014"
down_revision = "r0013"

_TABLES = ("run_summary", "replica_mismatch", "token", "act", "incident", "silence", "saved_view")


def upgrade() -> None:
    """Add the columns. As in r0013, rows that an older server changes on the same PostgreSQL lose them."""
    for table in _TABLES:
        op.add_column(table, sa.Column("checks", sa.LargeBinary))
        if op.get_bind().dialect.name == "postgresql":
            op.execute(
                f"CREATE TRIGGER collage_forget_checks BEFORE UPDATE ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION collage_forget_checks()"
            )
