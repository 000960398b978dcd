"""The tables of the server itself: tokens, audit log, incidents, leases.

It describes databases that exist: a change needs a step in `migrations/versions/`, and before a release another
baseline there. `tests/server/store/test_migrations.py` holds both equal.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from collage_server.store.schema import LONGEST_ID, LONGEST_NAME, metadata, row_checks

__all__ = ["SERVER_TABLES", "act", "incident", "lease", "log_out", "metadata", "saved_view", "silence", "token"]

_ID = String(LONGEST_ID)
_NAME = String(LONGEST_NAME)
_LONGEST_SUBJECT: Final = 255
"""What OpenID Connect allows for the id of a person."""

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
    Column("also", Text),
    Column("subject", String(_LONGEST_SUBJECT)),
    Column("provider_session", String(_LONGEST_SUBJECT)),
    Column("expires_at", Double),
    Column("idle_seconds", Double),
    row_checks(),
    UniqueConstraint("digest"),
)
"""`digest` is the secret's SHA-256; `projects` a JSON list, null for every project. Revoked tokens stay, but those
with a `subject`, the sessions of people, go once they have ended. `also` is a JSON list of further grants."""

log_out: Final = Table(
    "log_out",
    metadata,
    Column("digest", LargeBinary(32), primary_key=True),
    Column("expires_at", Double, nullable=False),
)
"""Log-out tokens of the provider that were taken, by the SHA-256 of their id, until they expire."""

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
    row_checks(),
)
"""The audit log: only ever appended to. `act_id` sorts by time."""
Index("act_by_time", act.c.time, act.c.act_id)

incident: Final = Table(
    "incident",
    metadata,
    Column("incident_id", _ID, primary_key=True),
    Column("open_key", _ID, unique=True),
    Column("run_id", _ID, nullable=False),
    Column("project", _NAME, nullable=False),
    Column("alert", _NAME, nullable=False),
    Column("severity", String(16), nullable=False),
    Column("source", String(16), nullable=False),
    Column("labels", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("value", Double),
    Column("step", BigInteger),
    Column("started_at", Double, nullable=False),
    Column("resolved_at", Double),
    Column("acknowledged_at", Double),
    Column("acknowledged_by", _ID),
    Column("sent", Text, nullable=False),
    Column("settled", Boolean, nullable=False),
    row_checks(),
)
"""One alert from when it fires until it ends. `open_key` tells alert and series while it fires, then null: what
fires stands here once, whoever noticed. `run_id` and `project` are empty for the server's own. `sent` lists
TARGET/STATE of delivered messages; `settled`: no message is owed any more."""
Index("incident_by_time", incident.c.started_at, incident.c.incident_id)
Index("incident_by_run", incident.c.run_id)

silence: Final = Table(
    "silence",
    metadata,
    Column("silence_id", _ID, primary_key=True),
    Column("alert", _NAME),
    Column("project", _NAME),
    Column("run_id", _ID),
    Column("comment", Text, nullable=False),
    Column("made_by", _ID, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("ends_at", Double, nullable=False),
    row_checks(),
)
"""Incidents that match what is not null are not sent until `ends_at`."""

lease: Final = Table(
    "lease",
    metadata,
    Column("name", _ID, primary_key=True),
    Column("holder", _ID, nullable=False),
    Column("ends_at", Double, nullable=False),
    Column("seconds", Double, nullable=False, server_default="0"),
)
"""Work that one of several servers does: whose it is, until when, and how long it was taken for. "archive" is none:
its holder is the id of the archive that belongs to this database."""

saved_view: Final = Table(
    "saved_view",
    metadata,
    Column("project", _NAME, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("search", Text, nullable=False),
    Column("made_by", _ID, nullable=False),
    Column("made_at", Double, nullable=False),
    row_checks(),
)
"""Views of the table of runs under a name: `search` is the part of the page's address that says what is shown."""

SERVER_TABLES: Final = (token, act, incident, silence, lease, log_out, saved_view)
"""No run_id leads their keys."""
