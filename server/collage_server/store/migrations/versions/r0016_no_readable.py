"""Finished numbers are exported as Parquet; the tables that held them a second time go."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Drop views and tables."""
    for view in ("run_point", "run_layer"):
        op.execute(f"DROP VIEW {view}")
    for table in ("measured_point", "layer_point"):
        op.drop_table(table)
