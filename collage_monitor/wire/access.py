"""Messages and answers about access: tokens, and the log of what administrators did."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from collage_monitor.wire.messages import Name

__all__ = ["Act", "ActPage", "ROLES", "Role", "Token", "TokenCreate", "TokenCreated", "TokenList"]

Role = Literal["ingest", "read", "operate", "admin"]
"""What a token is for: sending, reading, both with deleting, everything with tokens."""
ROLES: Final[tuple[Role, ...]] = ("ingest", "read", "operate", "admin")


class TokenCreate(Struct, kw_only=True, frozen=True):
    """Make a token. `projects` None is every project, now and later; an admin token always is for every project."""

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
    """A new token with its secret, which is said once and stored nowhere."""

    token: Token
    secret: str


class TokenList(Struct, kw_only=True, frozen=True):
    """Every token, newest first, revoked ones too."""

    tokens: list[Token]


class Act(Struct, kw_only=True, frozen=True):
    """What an administrator or operator did. `actor` is a token_id, "server-token", "loopback" or "host:USER"."""

    act_id: str
    time: float
    actor: str
    action: str
    subject: str
    project: str | None = None
    request_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


class ActPage(Struct, kw_only=True, frozen=True):
    """A page of acts, newest first, and the cursor of the next page."""

    acts: list[Act]
    cursor: str | None = None
