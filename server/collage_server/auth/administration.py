"""What administrators do: tokens made and revoked, each with its entry in the audit log."""

from __future__ import annotations

import secrets
from typing import Any, Final

from collage_monitor import wire
from collage_server.auth.principals import digest_of, new_secret
from collage_server.errors import Unprocessable
from collage_server.store import AccessStore

__all__ = ["create_token", "new_audit_log_entry", "revoke_token"]

_ID_BYTES: Final = 8


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
