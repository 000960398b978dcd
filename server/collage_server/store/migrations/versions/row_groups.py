"""Checksums of the rows that tell of runs. Those that are there have none, until they are changed."""

import sqlalchemy as sa
from alembic import op

revision = "r0013"
down_revision = "r0012"


_TABLES = ("run", "run_tag", "attempt", "measured_attempt", "layer", "stream", "run_latest", "entry", "event")
_FORGET = """
CREATE OR REPLACE FUNCTION collage_forget_checks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.checks IS NOT DISTINCT FROM OLD.checks THEN NEW.checks := NULL; END IF;
    RETURN NEW;
END $$
"""


def upgrade() -> None:
    """Add the columns. Servers of the previous release do not name them: a row that one of them changes on the same
    PostgreSQL loses its checksums there, so that nobody takes it for damaged."""
    for table in _TABLES:
        op.add_column(table, sa.Column("checks", sa.LargeBinary))
    if op.get_bind().dialect.name == "postgresql":
        op.execute(_FORGET)
        for table in _TABLES:
            op.execute(
                f"CREATE TRIGGER collage_forget_checks BEFORE UPDATE ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION collage_forget_checks()"
            )
