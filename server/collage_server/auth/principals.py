"""Who is asking: principals behind tokens, from a copy of the token table that is never older than five seconds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Thread
from typing import Final

from collage_monitor import wire
from collage_server.auth.roles import GRANTS, Capability
from collage_server.errors import Busy
from collage_server.store import AccessStore

__all__ = ["LOOPBACK", "Person", "Principal", "SERVER_TOKEN", "TokenDirectory", "digest_of", "new_secret"]

_LOG: Final = logging.getLogger(__name__)
_PREFIX: Final = "collage_"
_REFRESH_SECONDS: Final = 1.5
_OLDEST_SECONDS: Final = 4.5
_UNKNOWN_REFRESH_SECONDS: Final = 0.25
_NOTE_SECONDS: Final = 60.0
_MOST_AHEAD_SECONDS: Final = 300.0
"""More than the clocks of servers on one database may differ."""


@dataclass(frozen=True)
class Principal:
    """Who sends a request. actor: the name in the audit log. projects: None for every project.

    also: further roles in other projects. A route gets the principal `narrowed` to the grants that it needs.
    """

    actor: str
    role: wire.Role
    projects: frozenset[str] | None = None
    also: tuple[wire.Grant, ...] = ()
    is_session: bool = False

    def may(self, capability: Capability) -> bool:
        """Whether this role grants the capability."""
        return capability == "open" or capability in GRANTS[self.role]

    def narrowed(self, capability: Capability) -> Principal | None:
        """This principal with the projects whose grants allow it and their least role; None if none does."""
        if not self.also:
            return self if self.may(capability) else None
        own = wire.Grant(role=self.role, projects=None if self.projects is None else sorted(self.projects))
        allowed = [grant for grant in (own, *self.also) if capability == "open" or capability in GRANTS[grant.role]]
        if not allowed:
            return None
        everywhere = any(grant.projects is None for grant in allowed)
        projects = frozenset(project for grant in allowed for project in grant.projects or ())
        role = min((grant.role for grant in allowed), key=wire.ROLES.index)
        return replace(self, role=role, projects=None if everywhere else projects, also=())

    def owns(self, project: str | None) -> bool:
        """Whether this project is allowed; an unknown one (None) only if every project is."""
        return self.projects is None or project in self.projects


@dataclass(frozen=True)
class Person:
    """Somebody who signed in: the provider's ids of person and session, and what the groups allow here."""

    subject: str
    name: str
    grants: tuple[wire.Grant, ...]
    provider_session: str | None = None


LOOPBACK: Final = Principal("loopback", "admin")
"""Everyone on this machine, where the server asks for no token."""
SERVER_TOKEN: Final = Principal("server-token", "admin")
"""The bearer of the server's own token, the one in its settings."""


def new_secret() -> str:
    """Draw 256 random bits, with a prefix that secret scanners recognise."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str | bytes) -> bytes:
    """The SHA-256 of a secret: the store keeps this, never the secret.

    A plain fast hash without a salt is enough, because 256 random bits cannot be guessed. Timing leaks nothing: the
    look-up compares digests, and without the secret a caller cannot choose one.
    """
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


@dataclass(frozen=True)
class _Known:
    """A principal behind a token, and the token as the table had it."""

    principal: Principal
    token: wire.Token

    def is_over(self, now: float, used_at: float) -> bool:
        """Whether this is a session that has ended; `used_at`: its last use in this process."""
        token = self.token
        last = max(token.last_used_at or 0.0, token.created_at, used_at)
        # A fast clock dated this session in the future, which would make it last longer.
        is_ahead = last > now + _MOST_AHEAD_SECONDS
        if token.expires_at is not None and (now >= token.expires_at or is_ahead):
            return True
        return token.idle_seconds is not None and now - last >= token.idle_seconds


class TokenDirectory:
    """A copy of the valid tokens, refreshed in the background; used on the event loop only.

    A revocation by any process takes effect here within five seconds: an older copy is never used, even if the
    answer is then 503. `clock` gives Unix seconds, `monotonic` measures the copy's age.
    """

    def __init__(
        self,
        store: AccessStore,
        own: str | None,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._own = None if own is None else digest_of(own)
        self._clock = clock
        self._monotonic = monotonic
        self._known: dict[bytes, _Known] = {}
        self._loaded_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None
        self._noting: Thread | None = None
        self._changes = 0
        self._uses: dict[str, float] = {}
        self._noted: dict[str, float] = {}

    async def principal(self, secret: bytes, *, look_up: bool = True) -> Principal | None:
        """The principal behind this secret; None if it is unknown, revoked, or of a session that has ended.

        look_up: read the table again if the secret is unknown.

        Raises:
            Busy: the token table cannot be read, and the copy is too old to be trusted.
        """
        digest = digest_of(secret)
        if digest == self._own:
            return SERVER_TOKEN
        if self._age() > _REFRESH_SECONDS:
            refresh = self._refresh()
            if self._age() > _OLDEST_SECONDS:
                await asyncio.shield(refresh)
        found = self._known.get(digest)
        if found is None and look_up and self._age() > _UNKNOWN_REFRESH_SECONDS:
            # It may have been made a moment ago, by another process.
            await asyncio.shield(self._refresh())
            found = self._known.get(digest)
        if self._age() > _OLDEST_SECONDS:
            raise Busy("the tokens cannot be read now; send this request again later", retry_after_seconds=2)
        if found is None:
            return None
        actor, now = found.principal.actor, self._clock()
        if found.is_over(now, self._uses.get(actor, 0.0)):
            return None
        self._uses[actor] = now
        return found.principal

    def forget(self) -> None:
        """Read the table again before the next request: this process changed it."""
        self._changes += 1
        self._loaded_at = float("-inf")
        self._refreshing = None

    async def close(self, deadline_seconds: float) -> None:
        """Write the pending last uses, until the deadline."""
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing], timeout=deadline_seconds)
        if self._noting is None or not self._noting.is_alive():
            self._start_noting(dict(self._uses))
        if self._noting is not None:
            await asyncio.to_thread(self._noting.join, deadline_seconds)

    def _age(self) -> float:
        return self._monotonic() - self._loaded_at

    def _refresh(self) -> asyncio.Task[None]:
        """The running refresh, or a new one."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._read())
        return self._refreshing

    async def _read(self) -> None:
        began, changes = self._monotonic(), self._changes
        try:
            tokens = await asyncio.to_thread(self._store.unrevoked_tokens)
        except Exception as error:
            _LOG.warning("the tokens cannot be read: %s", error)
            return
        if changes != self._changes:
            return
        self._known = {digest: _Known(_principal(token), token) for digest, token in tokens.items()}
        self._loaded_at = began
        self._note_due()

    def _note_due(self) -> None:
        """Write last uses, each at most once a minute, and never in a request's way."""
        now = self._clock()
        due = {
            actor: at for actor, at in self._uses.items() if abs(now - self._noted.get(actor, 0.0)) >= _NOTE_SECONDS
        }
        known = {entry.principal.actor for entry in self._known.values()}
        for over in self._uses.keys() - known - due.keys():
            del self._uses[over]
            self._noted.pop(over, None)
        if due and (self._noting is None or not self._noting.is_alive()):
            self._noted |= dict.fromkeys(due, now)
            self._start_noting(due)

    def _start_noting(self, uses: dict[str, float]) -> None:
        # A thread of its own: the loop waits at its end for its own threads, however long a locked database takes.
        self._noting = Thread(target=self._note, args=(uses,), name="collage-last-uses", daemon=True)
        self._noting.start()

    def _note(self, uses: dict[str, float]) -> None:
        if not uses:
            return
        try:
            self._store.note_uses(uses)
        except Exception as error:
            _LOG.warning("the last use of %d tokens cannot be written: %s", len(uses), error)


def _principal(token: wire.Token) -> Principal:
    projects = None if token.projects is None else frozenset(token.projects)
    return Principal(token.token_id, token.role, projects, tuple(token.also), token.subject is not None)
