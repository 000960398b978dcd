"""The tables of access: tokens and the audit log. They belong to the server, not to a run: no run_id leads them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Double, Index, LargeBinary, String, Table, Text, UniqueConstraint

from collage_server.store.schema import metadata

__all__ = ["SERVER_TABLES", "act", "token"]

_ID = String(64)
_NAME = String(512)

token: Final = Table(
    "token",
    metadata,
    Column("token_id", _ID, primary_key=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("name", _NAME, nullable=False),
    Column("role", String(16), nullable=False),
    Column("projects", Text),
    Column("created_at", Double, nullable=False),
    Column("created_by", _ID, nullable=False),
    Column("last_used_at", Double),
    Column("revoked_at", Double),
    UniqueConstraint("digest"),
)
"""`digest` is the secret's SHA-256; `projects` a JSON list, null for every project. Revoked tokens stay."""

act: Final = Table(
    "act",
    metadata,
    Column("act_id", _ID, primary_key=True),
    Column("time", Double, nullable=False),
    Column("actor", _ID, nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", _NAME, nullable=False),
    Column("project", _NAME),
    Column("request_id", _ID),
    Column("details", Text, nullable=False),
)
"""The audit log: only ever appended to. `act_id` sorts by time."""
Index("act_by_time", act.c.time, act.c.act_id)

SERVER_TABLES: Final = (token, act)
