"""Runs, attempts, streams and the journal of reports."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.String(64)
_NAME = sa.String(512)


def upgrade() -> None:
    """Create the first tables."""
    _create_runs()
    _create_streams()
    _create_reports()


def _create_runs() -> None:
    op.create_table(
        "run",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("project", _NAME, nullable=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("group", _NAME),
        sa.Column("notes", sa.Text, nullable=False),
        sa.Column("seed", sa.BigInteger),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("strategy", _NAME),
        sa.Column("dtype", _NAME),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_index("run_by_age", "run", ["created_at", "run_id"])
    op.create_table(
        "run_tag",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("tag", _NAME, primary_key=True),
        sa.Column("position", sa.Integer, nullable=False),
    )
    op.create_table(
        "deleted_run",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("project", _NAME, nullable=False),
        sa.Column("deleted_at", sa.Double, nullable=False),
    )


def _create_streams() -> None:
    op.create_table(
        "attempt",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("launch_id", _ID, nullable=False),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.UniqueConstraint("run_id", "launch_id"),
    )
    op.create_table(
        "layer",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("layer", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("shape", sa.Text, nullable=False),
        sa.Column("dtype", _NAME, nullable=False),
        sa.Column("module_type", _NAME, nullable=False),
        sa.UniqueConstraint("run_id", "name"),
    )
    op.create_table(
        "stream",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("stream_id", _ID, primary_key=True),
        sa.Column("stream", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("rank", sa.BigInteger, nullable=False),
        sa.Column("world_size", sa.BigInteger, nullable=False),
        sa.Column("process_id", sa.BigInteger, nullable=False),
        sa.Column("statistics", sa.Text, nullable=False),
        sa.Column("layers", sa.LargeBinary, nullable=False),
        sa.Column("elements", sa.LargeBinary, nullable=False),
        sa.Column("replicas", sa.LargeBinary, nullable=False),
        sa.Column("watch", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.UniqueConstraint("run_id", "stream"),
    )
    op.create_index("stream_by_id", "stream", ["stream_id"])


def _create_reports() -> None:
    op.create_table(
        "report",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("stream_id", _ID, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("scalars", sa.Text),
        sa.Column("statistic_count", sa.Integer, nullable=False),
        sa.Column("layer_count", sa.Integer, nullable=False),
        sa.Column("model", sa.LargeBinary),
        sa.Column("statistics", sa.LargeBinary),
    )
    op.create_table(
        "run_latest",
        sa.Column("run_id", _ID, primary_key=True),
        sa.Column("stream_id", _ID, primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("rank", sa.BigInteger, nullable=False),
        sa.Column("reports", sa.BigInteger, nullable=False),
        sa.Column("last_seq", sa.BigInteger),
        sa.Column("first_step", sa.BigInteger),
        sa.Column("last_step", sa.BigInteger),
        sa.Column("first_time", sa.Double),
        sa.Column("last_report_at", sa.Double),
        sa.Column("measured_seq", sa.BigInteger),
        sa.Column("measured_step", sa.BigInteger),
        sa.Column("scalars", sa.Text, nullable=False),
    )
