"""Messages and answers about access: tokens, and the log of what administrators did."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from collage_monitor.wire.messages import Name

__all__ = ["Act", "ActPage", "ROLES", "Role", "Token", "TokenCreate", "TokenCreated", "TokenList"]

Role = Literal["ingest", "read", "operate", "admin"]
"""What a token allows: sending; reading; both, and deleting; everything, tokens included."""
ROLES: Final[tuple[Role, ...]] = ("ingest", "read", "operate", "admin")


class TokenCreate(Struct, kw_only=True, frozen=True):
    """Make a token. `projects` None means every project, present and future; an admin token is always for all."""

    name: Name
    role: Role
    projects: Annotated[list[Name], Meta(min_length=1, max_length=100)] | None


class Token(Struct, kw_only=True, frozen=True):
    """A token without its secret. Times are Unix seconds; `last_used_at` is exact to about a minute."""

    token_id: str
    name: str
    role: Role
    projects: list[str] | None
    created_at: float
    created_by: str
    last_used_at: float | None = None
    revoked_at: float | None = None


class TokenCreated(Struct, kw_only=True, frozen=True):
    """A new token with its secret, which is shown only here and stored nowhere."""

    token: Token
    secret: str


class TokenList(Struct, kw_only=True, frozen=True):
    """Every token, newest first, revoked ones included."""

    tokens: list[Token]


class Act(Struct, kw_only=True, frozen=True):
    """An entry of the audit log. `actor` is a token_id, "server-token", "loopback" or "host:USER"."""

    act_id: str
    time: float
    actor: str
    action: str
    subject: str
    project: str | None = None
    request_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


class ActPage(Struct, kw_only=True, frozen=True):
    """A page of the audit log, newest first, and the cursor of the next page."""

    acts: list[Act]
    cursor: str | None = None
