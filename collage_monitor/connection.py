"""A connection to a server: a request, its answer, or an error that says what to do.

`client.Client` adds the methods. The agent's `transport/http.py` has its own HTTP client and takes only `quoted`
and `named_dashboard`; the verbs in `command/` take the same two. `refusals.py` makes errors of answers. Errors are
fixed (`tests/contract/test_client.py`), and so is the order of server and token (`tests/server/test_frame.py`;
`named_dashboard`: `tests/end_to_end/test_up.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx

from collage_monitor import wire
from collage_monitor.backoff import Backoff
from collage_monitor.certificates import trusted_certificates
from collage_monitor.errors import CollageError, ServerUnreachable, Unavailable, WireError
from collage_monitor.local import known_server, sendable_token
from collage_monitor.refusals import refusal

__all__ = ["Connection", "named_dashboard", "quoted"]

_Answer = TypeVar("_Answer")
_Message = TypeVar("_Message")
_API: Final = "/api/v1"
_TRIES: Final = 9
_LONGEST_PAUSE_SECONDS: Final = 30.0
_FRONT_PAGE_SECONDS: Final = 2.0


class Connection:
    """Speaks to a Collage Monitor server. Thread-safe; close it, or use it as a context manager.

    Every method raises `ServerUnreachable` when nothing answers and a `ServerRefusal` when the server says no.
    Without an address it uses the same server and token as the command: those of COLLAGE_SERVER_URL and
    COLLAGE_TOKEN, otherwise of `collage-monitor login`, otherwise of the server that `up` keeps running. With an
    address it sends only the passed token. `transport` replaces the network (tests).

    Raises:
        CollageError: no address of a server, or a token that no header can carry. White space around a token is
            left out.
    """

    def __init__(
        self,
        server_url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if server_url is None:
            server_url, known = known_server()
            token = token or known
        if not server_url.startswith(("http://", "https://")):
            raise CollageError(f"{server_url!r} is no address of a server; write http://HOST:PORT, or https://…")
        headers = {"Authorization": f"Bearer {sendable_token(token)}"} if token else {}
        self.server_url = server_url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.server_url,
            headers=headers,
            timeout=timeout_seconds,
            transport=transport,
            trust_env=False,
            verify=trusted_certificates(self.server_url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def healthy(self) -> bool:
        """Whether the server answers and says that it is well."""
        try:
            return self._http.get("/healthz").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def page(self, path: str) -> httpx.Response:
        """A page beside the API: /metrics, /readyz."""
        return self._sent("GET", path)

    def get(self, path: str, kind: type[_Answer], query: Mapping[str, Any] | None = None) -> _Answer:
        """The answer to a question."""
        return self.send("GET", path, kind, query=query)

    def send(
        self,
        method: str,
        path: str,
        kind: type[_Answer],
        *,
        query: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        content_type: str | None = None,
    ) -> _Answer:
        """The answer to one request, sent once: the way to routes that have no method here."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        headers = {"Content-Type": content_type} if content_type else {}
        response = self._sent(method, _API + path, params=given, content=content, headers=headers)
        try:
            return wire.decode_message(response.content, kind, wire.JSON)
        except WireError as error:
            raise WireError(
                f"{self.server_url}{_API}{path} answers, but not as a Collage Monitor server does ({error})"
                "; is the address right?"
            ) from error

    def _sent(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"no answer from {self.server_url} ({error}); is it running? `collage-monitor up` starts one"
            ) from error
        if response.is_error:
            raise refusal(response)
        return response

    def post(
        self,
        path: str,
        message: _Message,
        kind: type[_Answer],
        encode: Callable[[_Message], bytes] = wire.encode_message,
    ) -> _Answer:
        """Send a message that may arrive twice: temporary failures are retried."""
        content = encode(message)
        backoff = Backoff(0.1, _LONGEST_PAUSE_SECONDS)
        for _ in range(_TRIES - 1):
            try:
                return self.send("POST", path, kind, content=content, content_type=wire.MSGPACK)
            except (ServerUnreachable, Unavailable) as error:
                time.sleep(backoff.pause(getattr(error, "retry_after_seconds", None)))
        return self.send("POST", path, kind, content=content, content_type=wire.MSGPACK)


def named_dashboard(server_url: str) -> str | None:
    """The address of the dashboard to which the server's front page leads; None if it leads nowhere, or nothing
    answers within two seconds."""
    try:
        answer = httpx.get(
            f"{server_url.rstrip('/')}/",
            timeout=_FRONT_PAGE_SECONDS,
            trust_env=False,
            verify=trusted_certificates(server_url),
        )
    except (httpx.HTTPError, httpx.InvalidURL, ServerUnreachable):
        return None
    address = answer.headers.get("Location", "").rstrip("/")
    return address if address.startswith(("http://", "https://")) else None


def quoted(part: str) -> str:
    """Text as one segment of a path, whatever characters it has."""
    return quote(part, safe="")
