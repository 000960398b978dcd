"""Tokens made and revoked, and sessions of people begun and ended, each with its entry in the audit log.

Routes (`api/access.py`) and the command `token` call these, so that no way is without an entry. Secrets are stored
as digests alone (`tests/server/test_access.py`).
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec

from collage_monitor import wire
from collage_server.auth.principals import Person, digest_of, new_secret
from collage_server.errors import Unprocessable
from collage_server.settings import Settings
from collage_server.store import AccessStore, LogOut

__all__ = ["create_token", "end_session", "end_sessions", "new_audit_log_entry", "open_session", "revoke_token"]

_ID_BYTES: Final = 8
_SESSION_IDLE_SECONDS: Final = 3_600.0
"""A session that is not used for so long ends; uses are known to about a minute."""


def new_audit_log_entry(now: float, actor: str, action: str, subject: str, **more: Any) -> wire.AuditLogEntry:
    """A new entry of the audit log; `more` may give project, details, request_id and client."""
    act_id = f"{int(now * 1000):012x}{secrets.token_hex(_ID_BYTES)}"
    return wire.AuditLogEntry(act_id=act_id, time=now, actor=actor, action=action, subject=subject, **more)


def create_token(
    store: AccessStore, create: wire.TokenCreate, now: float, actor: str, **asked: Any
) -> wire.TokenCreated:
    """Make a token; its secret is in the answer and nowhere else. `asked` may give request_id and client.

    Raises:
        Unprocessable: an administrator's token for some projects only.
    """
    if create.role == "admin" and create.projects is not None:
        raise Unprocessable(
            "an admin token is for every project, because it makes tokens for any; leave its projects out",
            field="projects",
        )
    projects = None if create.projects is None else list(dict.fromkeys(create.projects))
    secret = new_secret()
    token = wire.Token(
        token_id=secrets.token_hex(_ID_BYTES),
        name=create.name,
        role=create.role,
        projects=projects,
        created_at=now,
        created_by=actor,
    )
    details = {"name": create.name, "role": create.role, "projects": projects}
    entry = new_audit_log_entry(now, actor, "token.create", token.token_id, details=details, **asked)
    store.add_token(token, digest_of(secret), [entry])
    return wire.TokenCreated(token=token, secret=secret)


def revoke_token(store: AccessStore, token_id: str, now: float, actor: str, **asked: Any) -> wire.Token:
    """Revoke a token for good. `asked` may give request_id and client.

    Raises:
        NotFound: no token has this id.
    """
    entry = new_audit_log_entry(now, actor, "token.revoke", token_id, **asked)
    return store.revoke_token(token_id, now, [entry])


def open_session(
    store: AccessStore, person: Person, settings: Settings, now: float, actor: str, **asked: Any
) -> wire.TokenCreated:
    """Begin the session of a person: a token with an end. `asked` may give request_id and client."""
    secret = new_secret()
    first, *also = person.grants
    session = wire.Token(
        token_id=secrets.token_hex(_ID_BYTES),
        name=person.name,
        role=first.role,
        projects=first.projects,
        also=also,
        subject=person.subject,
        created_at=now,
        created_by=actor,
        expires_at=now + settings.session_seconds,
        idle_seconds=_SESSION_IDLE_SECONDS,
    )
    details = {"name": person.name, "subject": person.subject, "grants": msgspec.to_builtins(person.grants)}
    entry = new_audit_log_entry(now, actor, "session.begin", session.token_id, details=details, **asked)
    store.add_token(session, digest_of(secret), [entry], person.provider_session)
    return wire.TokenCreated(token=session, secret=secret)


def end_session(store: AccessStore, token_id: str, now: float, **asked: Any) -> None:
    """End the session of somebody who signs out. `asked` may give request_id and client."""
    store.revoke_token(token_id, now, [new_audit_log_entry(now, token_id, "session.end", token_id, **asked)])


def end_sessions(store: AccessStore, log_out: LogOut, now: float, **asked: Any) -> None:
    """End the sessions that a provider's log-out token is about. `asked` may give request_id and client.

    Raises:
        BadRequest: this log-out token was taken before.
    """
    store.end_sessions(
        log_out, now, lambda token_id: new_audit_log_entry(now, "oidc-provider", "session.end", token_id, **asked)
    )
