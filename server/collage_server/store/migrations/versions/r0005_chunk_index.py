"""An index that answers which chunks a run has without touching their points."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

_COLUMNS = ["run_id", "attempt", "chunk", "level", "point_count", "first_step", "last_step"]


def upgrade() -> None:
    """Create the index."""
    op.create_index("point_chunk_by_place", "point_chunk", _COLUMNS)
