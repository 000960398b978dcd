"""What deletions keep, so that they can be undone for a while."""

import sqlalchemy as sa
from alembic import op

revision = "r0016"
down_revision = "r0015"


def upgrade() -> None:
    """Add the columns. A server of the previous release does not name them: where it serves the same PostgreSQL,
    it removes journal and chunks of every deleted run at once, so that a run comes back without its points."""
    op.add_column("deleted_run", sa.Column("kept_until", sa.Double()))
    op.add_column("deleted_run", sa.Column("kept", sa.LargeBinary()))
