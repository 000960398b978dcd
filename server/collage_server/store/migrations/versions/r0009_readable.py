"""Finished numbers in real columns, and views of them for SQL by hand; what is sealed from now on stands there."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_ID = sa.String(64)
_POINT = (
    *("tokens", "loss", "validation_loss", "learning_rate"),
    *("edq_ratio", "edq_visible_ratio", "edq_oracle_ratio", "lost_update_ratio", "lost_visible_ratio"),
    *("state_decrement_ratio", "half_ulp_margin", "update_to_weight_ratio", "grad_norm", "param_norm"),
)
_LAYER = (
    *("edq_ratio", "edq_visible_ratio", "lost_update_ratio", "state_decrement_ratio", "half_ulp_margin"),
    *("update_to_weight_ratio", "edq_ratio_minimum", "edq_ratio_maximum"),
)
_VISIBLE = (
    "NOT EXISTS (SELECT 1 FROM attempt AS newer WHERE newer.run_id = p.run_id AND newer.attempt > p.attempt "
    "AND newer.first_step <= p.step)"
)


def upgrade() -> None:
    """Create tables and views."""
    op.create_table(
        "measured_point",
        *_key("attempt"),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("ranks", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Double) for name in _POINT),
    )
    op.create_table(
        "layer_point",
        *_key("attempt", "chunk", "layer"),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("measured_steps", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Double) for name in _LAYER),
    )
    numbers = ", ".join(f"p.{name}" for name in ("attempt", "step", "time", "ranks", *_POINT))
    op.execute(
        f"CREATE VIEW run_point AS SELECT r.project, r.name AS run, r.strategy, p.run_id, {numbers} "
        f"FROM measured_point AS p JOIN run AS r ON r.run_id = p.run_id WHERE {_VISIBLE}"
    )
    numbers = ", ".join(
        f"p.{name}" for name in ("attempt", "first_step", "step", "time", "measured_steps", *_LAYER)
    )
    op.execute(
        "CREATE VIEW run_layer AS SELECT r.project, r.name AS run, r.strategy, p.run_id, l.name AS layer, "
        f"l.module_type, {numbers} FROM layer_point AS p JOIN run AS r ON r.run_id = p.run_id "
        f"JOIN layer AS l ON l.run_id = p.run_id AND l.layer = p.layer WHERE {_VISIBLE}"
    )


def _key(*names: str) -> list[sa.Column[Any]]:
    columns: list[sa.Column[Any]] = [sa.Column("run_id", _ID, primary_key=True)]
    columns += [sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in names]
    return columns
