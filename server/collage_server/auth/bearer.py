"""Who may ask for what: a bearer token's role and projects; without tokens only this machine, no foreign page.

Middleware calls it before each request. `roles.py` has the table of what a role may do, `principals.py` finds the
owner of a token. It fails closed (`tests/server/test_access.py`, `test_matrix.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from cachetools import LRUCache
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection

from collage_monitor.local import LOOPBACK_HOSTS
from collage_monitor.recent_failures import RecentFailures
from collage_monitor.wire import ROLES
from collage_server.auth.principals import LOOPBACK, Principal, TokenDirectory
from collage_server.auth.roles import GRANTS, Capability, matched_rule
from collage_server.errors import (
    Forbidden,
    NotFound,
    TooManyFailures,
    Unauthorised,
    Unprocessable,
    unknown_run,
    unknown_stream,
)
from collage_server.settings import Settings
from collage_server.store import AccessStore

__all__ = ["AccessPolicy", "audit_fields", "principal_of"]

_SCHEME: Final = b"bearer "
_NOBODY: Final = Principal("nobody", "read", frozenset())
_MOST_RUNS: Final = 1000
_KEPT_OWNERS: Final = 20_000
_MOST_ADDRESSES: Final = 20_000
_MOST_FAILURES: Final = 20
_FAILURE_SECONDS: Final = 60.0


def principal_of(connection: HTTPConnection) -> Principal:
    """The principal that AccessControl found for this request."""
    principal = connection.scope["state"]["principal"]
    if not isinstance(principal, Principal):
        raise TypeError("the request did not come through AccessControl")
    return principal


def audit_fields(connection: HTTPConnection) -> dict[str, Any]:
    """The request's fields for an entry of the audit log."""
    client = connection.client
    return {
        "request_id": connection.scope["state"]["request_id"],
        "client": None if client is None else client.host,
    }


class AccessPolicy:
    """Decides by method, path, query and headers. A run's project never changes, so it is cached."""

    def __init__(self, settings: Settings, directory: TokenDirectory, store: AccessStore) -> None:
        self._no_auth = settings.no_auth
        named = frozenset(name.lower() for name in settings.allowed_hosts)
        self._hosts = LOOPBACK_HOSTS | named if named or settings.no_auth else None
        self._failures = RecentFailures(_FAILURE_SECONDS, _MOST_ADDRESSES)
        self._directory = directory
        self._store = store
        self._owners: LRUCache[tuple[str, str], str] = LRUCache(_KEPT_OWNERS)

    async def admit(
        self, method: str, path: str, query: bytes, headers: Mapping[bytes, bytes], client: str | None = None
    ) -> Principal:
        """Let the request pass, as the returned principal; `headers` by their names in lower case.

        client: the client's address.

        Raises:
            Unauthorised: no valid token, and the route needs one.
            TooManyFailures: an unknown token, after too many from this address.
            Forbidden: the role or the project does not allow it; a foreign host; without tokens, a foreign origin.
            NotFound: a run or stream of another project, a route without a rule.
        """
        self._check_host(headers)
        if self._no_auth:
            _check_origin(headers)
            return LOOPBACK
        rule = matched_rule(method, path)
        if rule is not None and rule[0] == "open":
            return _NOBODY
        principal = await self._authenticated(headers, client)
        if rule is None:
            if principal.role != "admin":
                raise NotFound(f"{method} {path}: not found; GET /openapi.json lists the routes")
            return principal
        capability, ids = rule
        narrowed = principal.narrowed(capability)
        if narrowed is None:
            raise Forbidden(_refusal(principal, capability, method, path), field="Authorization")
        if narrowed.projects is not None:
            await self._check_projects(narrowed, principal.narrowed("any") or narrowed, ids, query)
        return narrowed

    async def project_of(self, method: str, path: str) -> str | None:
        """The project that a request is about, as far as its path tells; None where nothing has such an id."""
        rule = matched_rule(method, path)
        ids = {} if rule is None else rule[1]
        if "run_id" in ids:
            return await self._owner("run", ids["run_id"], self._store.project_of)
        if "stream_id" in ids:
            return await self._owner("stream", ids["stream_id"], self._store.project_of_stream)
        return ids.get("project")

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Against DNS rebinding: a page of another name must not reach the server under that name."""
        host = headers.get(b"host", b"")
        if self._hosts is not None and _name(b"//" + host) not in self._hosts:
            raise Forbidden(
                f"host {host.decode('latin-1')!r} is not served here; use one of {', '.join(sorted(self._hosts))}, "
                "or start the server with --allowed-host",
                field="Host",
            )

    async def _authenticated(self, headers: Mapping[bytes, bytes], client: str | None) -> Principal:
        header = headers.get(b"authorization", b"")
        if header[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthorised("no token; send the header Authorization: Bearer TOKEN", field="Authorization")
        failures = self._failures.count(client)
        secret = header[len(_SCHEME) :].strip()
        principal = await self._directory.principal(secret, look_up=failures < _MOST_FAILURES)
        if principal is None and failures >= _MOST_FAILURES:
            raise TooManyFailures(
                f"{failures} unknown tokens from this address; ask with a known one, or again in a minute",
                retry_after_seconds=int(_FAILURE_SECONDS),
            )
        if principal is None:
            self._failures.add(client)
            raise Unauthorised(
                "this token is not known here, or was revoked; the local server's stands in the file `token` of "
                "its data folder, `collage-monitor token create` makes others",
                field="Authorization",
            )
        return principal

    async def _check_projects(
        self, principal: Principal, anywhere: Principal, ids: dict[str, str], query: bytes
    ) -> None:
        """Check the projects. `principal`: the caller here; `anywhere`: with all projects that it may see."""
        if "project" in ids and not principal.owns(ids["project"]):
            raise Forbidden(
                f"this token is not for project {ids['project']!r}; it is for "
                f"{', '.join(sorted(principal.projects or ()))}",
                field="project",
            )
        asked = [value for name, value in parse_qsl(query.decode("latin-1")) if name == "run"]
        if len(asked) > _MOST_RUNS:
            raise Unprocessable(
                f"{len(asked)} runs in one question, at most {_MOST_RUNS}", field="run", limit=_MOST_RUNS
            )
        if "run_id" in ids:
            asked.append(ids["run_id"])
        for run_id in dict.fromkeys(asked):
            project = await self._owner("run", run_id, self._store.project_of)
            if not principal.owns(project):
                raise _out_of_reach(principal, anywhere, project, unknown_run(run_id))
        if "stream_id" in ids:
            stream_id = ids["stream_id"]
            project = await self._owner("stream", stream_id, self._store.project_of_stream)
            if not principal.owns(project):
                raise _out_of_reach(principal, anywhere, project, unknown_stream(stream_id))

    async def _owner(self, kind: str, name: str, ask: Callable[[str], str | None]) -> str | None:
        known = self._owners.get((kind, name))
        if known is None:
            known = await run_in_threadpool(ask, name)
            if known is not None:
                self._owners[kind, name] = known
        return known


def _refusal(principal: Principal, capability: Capability, method: str, path: str) -> str:
    allowed = [role for role in ROLES if capability in GRANTS[role]]
    return f"a token of role {principal.role!r} may not {method} {path}; use one of role {' or '.join(allowed)}"


def _out_of_reach(
    principal: Principal, anywhere: Principal, project: str | None, unknown: NotFound
) -> NotFound | Forbidden:
    """Answers as for an unknown id, unless the caller may see the project but not do this there."""
    if project is None or not anywhere.owns(project):
        return unknown
    able = ", ".join(sorted(principal.projects or ()))
    return Forbidden(f"this session may not do that in project {project!r}, only in {able}", field="project")


def _check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuse foreign pages: an Origin, if there is one, must equal the Host."""
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower():
        page = origin.decode("latin-1")
        raise Forbidden(f"pages of {page!r} may not ask a server without tokens", field="Origin")


@lru_cache(maxsize=64)
def _name(address: bytes) -> str | None:
    try:
        return urlsplit(address.decode("latin-1")).hostname
    except ValueError:
        return None
