"""The step up to which a stream's attempt takes no more totals, because retention has dropped its single points."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_FILL = """
UPDATE run_latest SET frozen_step = (
    SELECT max(coarse.last_step) FROM point_chunk AS coarse
    WHERE coarse.run_id = run_latest.run_id AND coarse.attempt = run_latest.attempt AND NOT EXISTS (
        SELECT 1 FROM point_chunk AS fine
        WHERE fine.run_id = coarse.run_id AND fine.attempt = coarse.attempt
        AND fine.chunk = coarse.chunk AND fine.level = 1
    )
)
WHERE EXISTS (SELECT 1 FROM point_chunk WHERE point_chunk.run_id = run_latest.run_id)
"""


def upgrade() -> None:
    """Add the column, and fill it from the chunks that are frozen already."""
    op.add_column("run_latest", sa.Column("frozen_step", sa.BigInteger))
    op.execute(_FILL)
