"""Tokens, the audit log, and which project owns a run, on an SQL database.

`auth/`, `api/` and the command `token` use it as `store.access`. It stores digests, never secrets. Entries of the
audit log do not change, and only `sealing/retention.py` deletes old ones (`tests/server/store/access_contract.py`).
`run_store.py` appends the entry of a deletion in the deletion's own transaction.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, or_, select
from sqlalchemy.exc import DatabaseError, IntegrityError

from collage_monitor import wire
from collage_server.errors import BadRequest, Damaged, NotFound, Unprocessable
from collage_server.store import schema
from collage_server.store.row_checks import update_rows, whole_of
from collage_server.store.row_helpers import from_json, to_json
from collage_server.store.server_tables import act as ACT
from collage_server.store.server_tables import log_out as LOG_OUT
from collage_server.store.server_tables import token as TOKEN

__all__ = ["AccessStore", "LogOut", "append_to_audit_log"]

Transaction = Callable[[], AbstractContextManager[Connection]]
_CLIENT: Final = "client address"
_HIDDEN: Final = ("digest", "provider_session", "checks")
_SHOWN: Final = [column for column in TOKEN.columns if column.name not in _HIDDEN]


@dataclass(frozen=True)
class LogOut:
    """A provider's log-out token: it ends all sessions of `subject`, or the one session; at least one is given.

    digest: the SHA-256 of the token's id, by which it works once; it may be forgotten at `expires_at`.
    """

    digest: bytes
    expires_at: float
    subject: str | None
    provider_session: str | None


class AccessStore:
    """Tokens, the audit log, and which project owns a run; every method is one transaction, from any thread."""

    def __init__(self, reading: Transaction, writing: Transaction) -> None:
        self._reading = reading
        self._writing = writing

    def add_token(
        self,
        token: wire.Token,
        digest: bytes,
        audit_entries: Sequence[wire.AuditLogEntry],
        provider_session: str | None = None,
    ) -> None:
        """Keep a new token with its entry in the audit log; a new session also deletes those that have ended.

        provider_session: the provider's id of the session, if a person signed in.
        """
        values = msgspec.structs.asdict(token)
        values["projects"] = None if token.projects is None else to_json(token.projects)
        values["also"] = to_json(token.also) if token.also else None
        over = or_(TOKEN.c.expires_at <= token.created_at, TOKEN.c.revoked_at <= token.created_at)
        with self._writing() as connection:
            if token.subject is not None:
                connection.execute(delete(TOKEN).where(TOKEN.c.subject.is_not(None), over))
            row = {"digest": digest, "provider_session": provider_session, **values}
            connection.execute(insert(TOKEN).values(**row))
            append_to_audit_log(connection, audit_entries)

    def tokens(self) -> list[wire.Token]:
        """Every token, newest first, without damaged ones."""
        statement = select(TOKEN).order_by(TOKEN.c.created_at.desc(), TOKEN.c.token_id)
        with self._reading() as connection:
            return [_token(row) for row in whole_of(connection, statement, TOKEN)[0]]

    def unrevoked_tokens(self) -> dict[bytes, wire.Token]:
        """The tokens that are not revoked, by their secret's SHA-256. A damaged one opens nothing."""
        statement = select(TOKEN).where(TOKEN.c.revoked_at.is_(None))
        with self._reading() as connection:
            return {bytes(row.digest): _token(row) for row in whole_of(connection, statement, TOKEN)[0]}

    def revoke_token(self, token_id: str, now: float, audit_entries: Sequence[wire.AuditLogEntry]) -> wire.Token:
        """Revoke a token; a second call changes and records nothing.

        Raises:
            NotFound: no token has this id.
            Damaged: its row is damaged; it opens nothing.
        """
        mine = TOKEN.c.token_id == token_id
        with self._writing() as connection:
            if update_rows(connection, TOKEN, {"revoked_at": now}, mine, TOKEN.c.revoked_at.is_(None)):
                append_to_audit_log(connection, audit_entries)
            row = connection.execute(select(TOKEN).where(mine)).first()
        if row is None:
            raise NotFound(f"no token {token_id!r}; GET /api/v1/tokens lists them", field="token_id")
        return _token(row)

    def end_sessions(
        self, log_out: LogOut, now: float, audit_entry: Callable[[str], wire.AuditLogEntry]
    ) -> list[str]:
        """End the sessions that a log-out token names, with an entry for each; return their ids.

        Raises:
            BadRequest: this log-out token was taken before.
        """
        mine: list[ColumnElement[bool]] = [TOKEN.c.subject.is_not(None), TOKEN.c.revoked_at.is_(None)]
        if log_out.subject is not None:
            mine.append(TOKEN.c.subject == log_out.subject)
        if log_out.provider_session is not None:
            theirs = TOKEN.c.provider_session
            # A log-out that names the person also ends sessions that began without the provider's session id.
            known = theirs == log_out.provider_session
            mine.append(known if log_out.subject is None else or_(known, theirs.is_(None)))
        with self._writing() as connection:
            connection.execute(delete(LOG_OUT).where(LOG_OUT.c.expires_at <= now))
            try:
                connection.execute(insert(LOG_OUT).values(digest=log_out.digest, expires_at=log_out.expires_at))
            except IntegrityError as error:
                raise BadRequest("this log-out token was taken before", field="logout_token") from error
            ended = list(connection.execute(select(TOKEN.c.token_id).where(*mine)).scalars())
            for token_id in ended:
                try:
                    update_rows(connection, TOKEN, {"revoked_at": now}, TOKEN.c.token_id == token_id)
                except (Damaged, DatabaseError):  # Once healed it would open the server again.
                    connection.execute(delete(TOKEN).where(TOKEN.c.token_id == token_id))
            append_to_audit_log(connection, [audit_entry(token_id) for token_id in ended])
        return ended

    def note_uses(self, last_used_at: Mapping[str, float]) -> None:
        """Store when tokens were last used, unless a later use is known."""
        used = TOKEN.c.last_used_at
        with self._writing() as connection:
            for token_id, at in last_used_at.items():
                newer = or_(used.is_(None), used < at)
                with suppress(Damaged):
                    update_rows(connection, TOKEN, {"last_used_at": at}, TOKEN.c.token_id == token_id, newer)

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
            rows, damaged = whole_of(connection, statement, ACT)
        entries = [_entry(row) for row in rows[:limit]]
        more = entries and len(rows) + len(damaged) > limit
        return wire.AuditLogPage(acts=entries, cursor=_cursor(entries[-1]) if more else None, damaged=damaged)

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
        # Layers are numbered from 0: the last number is one look-up, while counting reads all rows.
        last = select(func.max(layer.c.layer)).where(layer.c.run_id == run.c.run_id).scalar_subquery()
        count = select(func.coalesce(func.sum(last + 1), 0)).where(run.c.project == project)
        with self._reading() as connection:
            return int(connection.execute(count).scalar_one())


def _project_of(connection: Connection, run_id: str) -> str | None:
    for table in (schema.run, schema.deleted_run):
        project = connection.execute(select(table.c.project).where(table.c.run_id == run_id)).scalar()
        if project is not None:
            return str(project)
    return None


def append_to_audit_log(connection: Connection, entries: Sequence[wire.AuditLogEntry]) -> None:
    """Append entries in the transaction of the change that they record, so that both are stored or neither."""
    if entries:
        connection.execute(insert(ACT), [_entry_row(entry) for entry in entries])


def _entry_row(entry: wire.AuditLogEntry) -> dict[str, Any]:
    """Make a row; the client goes into the details, because the table has no column for it."""
    values = msgspec.structs.asdict(entry)
    client = values.pop("client")
    return values | {"details": to_json(entry.details if client is None else {**entry.details, _CLIENT: client})}


def _token(row: Row[Any]) -> wire.Token:
    values = {column.name: getattr(row, column.name) for column in _SHOWN}
    also = [] if row.also is None else msgspec.convert(from_json(row.also), list[wire.Grant])
    return wire.Token(
        **values | {"projects": None if row.projects is None else from_json(row.projects), "also": also}
    )


def _entry(row: Row[Any]) -> wire.AuditLogEntry:
    values = {column.name: getattr(row, column.name) for column in ACT.columns if column.name != "checks"}
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
