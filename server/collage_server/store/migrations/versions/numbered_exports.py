"""The numbers of what OpenTelemetry's exporters send."""

import sqlalchemy as sa
from alembic import op

revision = "r0015"
down_revision = "r0014"


def upgrade() -> None:
    """Add the table; servers of the previous release do not name it."""
    op.create_table(
        "numbered_export",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("stream_id", sa.String(64), primary_key=True),
        sa.Column("known", sa.Text, nullable=False),
        sa.Column("checks", sa.LargeBinary),
    )
