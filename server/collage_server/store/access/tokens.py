"""Tokens, the audit log, and which project owns a run, on an SQL database."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Row, bindparam, func, insert, or_, select, update

from collage_monitor import wire
from collage_server.errors import NotFound, Unprocessable
from collage_server.store import schema
from collage_server.store.rows import from_json, to_json
from collage_server.store.server_tables import act as ACT
from collage_server.store.server_tables import token as TOKEN

__all__ = ["AccessStore", "append_to_audit_log"]

Transaction = Callable[[], AbstractContextManager[Connection]]
_CLIENT: Final = "client address"
_SHOWN: Final = [column for column in TOKEN.columns if column.name != "digest"]


class AccessStore:
    """Tokens, the audit log, and which project owns a run; every method is one transaction, from any thread."""

    def __init__(self, reading: Transaction, writing: Transaction) -> None:
        self._reading = reading
        self._writing = writing

    def add_token(self, token: wire.Token, digest: bytes, audit_entries: Sequence[wire.AuditLogEntry]) -> None:
        """Keep a new token, and the entry of the audit log that says who made it."""
        values = msgspec.structs.asdict(token)
        values["projects"] = None if token.projects is None else to_json(token.projects)
        with self._writing() as connection:
            connection.execute(insert(TOKEN).values(digest=digest, **values))
            append_to_audit_log(connection, audit_entries)

    def tokens(self) -> list[wire.Token]:
        """Every token, newest first."""
        statement = select(*_SHOWN).order_by(TOKEN.c.created_at.desc(), TOKEN.c.token_id)
        with self._reading() as connection:
            return [_token(row) for row in connection.execute(statement)]

    def valid_tokens(self) -> dict[bytes, wire.Token]:
        """The tokens that are not revoked, by their secret's SHA-256."""
        statement = select(TOKEN).where(TOKEN.c.revoked_at.is_(None))
        with self._reading() as connection:
            return {bytes(row.digest): _token(row) for row in connection.execute(statement)}

    def revoke_token(self, token_id: str, now: float, audit_entries: Sequence[wire.AuditLogEntry]) -> wire.Token:
        """Revoke a token, once; a second time changes and records nothing.

        Raises:
            NotFound: no token has this id.
        """
        mine = TOKEN.c.token_id == token_id
        with self._writing() as connection:
            changed = connection.execute(
                update(TOKEN).where(mine, TOKEN.c.revoked_at.is_(None)).values(revoked_at=now)
            )
            if changed.rowcount:
                append_to_audit_log(connection, audit_entries)
            row = connection.execute(select(*_SHOWN).where(mine)).first()
        if row is None:
            raise NotFound(f"no token {token_id!r}; GET /api/v1/tokens lists them", field="token_id")
        return _token(row)

    def note_uses(self, last_used_at: Mapping[str, float]) -> None:
        """Write when tokens were last used; an older time than the known one changes nothing."""
        newer = or_(TOKEN.c.last_used_at.is_(None), TOKEN.c.last_used_at < bindparam("used_at"))
        statement = update(TOKEN).where(TOKEN.c.token_id == bindparam("used_id"), newer)
        rows = [{"used_id": token_id, "used_at": at} for token_id, at in last_used_at.items()]
        with self._writing() as connection:
            connection.execute(statement.values(last_used_at=bindparam("used_at")), rows)

    def audit_log(self, cursor: str | None, limit: int) -> wire.AuditLogPage:
        """A page of the audit log, newest first.

        Raises:
            Unprocessable: the cursor is not one of ours.
        """
        statement = select(ACT).order_by(ACT.c.time.desc(), ACT.c.act_id.desc()).limit(limit + 1)
        if cursor is not None:
            time, act_id = _place(cursor)
            statement = statement.where(or_(ACT.c.time < time, (ACT.c.time == time) & (ACT.c.act_id < act_id)))
        with self._reading() as connection:
            rows = connection.execute(statement).all()
        entries = [_entry(row) for row in rows[:limit]]
        return wire.AuditLogPage(acts=entries, cursor=_cursor(entries[-1]) if len(rows) > limit else None)

    def project_of(self, run_id: str) -> str | None:
        """The project that owns a run, also a deleted one; None when the id was never seen."""
        with self._reading() as connection:
            return _project_of(connection, run_id)

    def project_of_stream(self, stream_id: str) -> str | None:
        """The project that owns a stream's run; None when the id was never seen."""
        stream = schema.stream
        with self._reading() as connection:
            run_id = connection.execute(select(stream.c.run_id).where(stream.c.stream_id == stream_id)).scalar()
            return None if run_id is None else _project_of(connection, run_id)

    def count_layers(self, project: str) -> int:
        """How many layers a project holds, summed over its runs."""
        run, layer = schema.run, schema.layer
        mine = select(run.c.run_id).where(run.c.project == project)
        count = select(func.count()).select_from(layer).where(layer.c.run_id.in_(mine))
        with self._reading() as connection:
            return int(connection.execute(count).scalar_one())


def _project_of(connection: Connection, run_id: str) -> str | None:
    for table in (schema.run, schema.deleted_run):
        project = connection.execute(select(table.c.project).where(table.c.run_id == run_id)).scalar()
        if project is not None:
            return str(project)
    return None


def append_to_audit_log(connection: Connection, entries: Sequence[wire.AuditLogEntry]) -> None:
    """Append entries in the transaction of the change that they record: neither is stored without the other."""
    if entries:
        connection.execute(insert(ACT), [_entry_row(entry) for entry in entries])


def _entry_row(entry: wire.AuditLogEntry) -> dict[str, Any]:
    """The client stands among the details: the table has no column of its own for it."""
    values = msgspec.structs.asdict(entry)
    client = values.pop("client")
    return values | {"details": to_json(entry.details if client is None else {**entry.details, _CLIENT: client})}


def _token(row: Row[Any]) -> wire.Token:
    values = {column.name: getattr(row, column.name) for column in _SHOWN}
    return wire.Token(**values | {"projects": None if row.projects is None else from_json(row.projects)})


def _entry(row: Row[Any]) -> wire.AuditLogEntry:
    values = {column.name: getattr(row, column.name) for column in ACT.columns}
    details = from_json(row.details)
    return wire.AuditLogEntry(**values | {"client": details.pop(_CLIENT, None), "details": details})


def _cursor(entry: wire.AuditLogEntry) -> str:
    return base64.urlsafe_b64encode(f"{entry.time.hex()} {entry.act_id}".encode()).decode()


def _place(cursor: str) -> tuple[float, str]:
    try:
        time, _, act_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(" ")
        return float.fromhex(time), act_id
    except (ValueError, OverflowError, binascii.Error) as error:
        raise Unprocessable(
            f"cursor {cursor!r} is not one of this server's; start again without it", field="cursor"
        ) from error
