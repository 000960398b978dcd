"""An index that answers what runs are sorted, filtered and grouped by without touching their overviews."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"

_NUMBERS = (
    "edq_ratio",
    "lost_update_ratio",
    "state_decrement_ratio",
    "loss",
    "validation_loss",
    "bytes_per_parameter",
    "tokens_per_second",
)


def upgrade() -> None:
    """Create the index."""
    columns = ["run_id", "updated_at", "last_step", *_NUMBERS, "health", "configuration"]
    op.create_index("run_overview_narrow", "run_overview", columns)
