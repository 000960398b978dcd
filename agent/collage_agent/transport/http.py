"""Sending to the server over HTTP: one connection, repeated with back-off, refusals distinguished from absences.

It implements `envelope.Transport` for the server's `/api/v1`; routes and bodies are the contract's. Pauses are
`DeliveryLimits`' (`tests/agent_delivery/test_http.py`).
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import httpx

from collage_agent.run_settings import DeliveryLimits
from collage_agent.transport.envelope import WORKER_THREAD_NAME, Envelope
from collage_monitor.backoff import Backoff
from collage_monitor.certificates import trusted_certificates
from collage_monitor.connection import named_dashboard, quoted
from collage_monitor.errors import ServerRefusal, ServerUnreachable, Unavailable, WireError
from collage_monitor.local import DEFAULT_DASHBOARD_URL, DEFAULT_SERVER_URL, is_loopback, local_server
from collage_monitor.refusals import refusal
from collage_monitor.wire import JSON, MSGPACK, BatchAnswer, Health, Stream, decode_message

__all__ = ["HttpTransport", "dashboard_of"]

_LOG = logging.getLogger("collage_agent")
_COMPRESSED_FROM_BYTES: Final = 6 * 2**20
"""Longer bodies are compressed: the server takes 16 MiB as sent, 64 MiB behind an encoding."""
_NO_REPORTS: Final = BatchAnswer(accepted=0, duplicates=0)


class HttpTransport:
    """POSTs messages to one server with a bearer token.

    `token` is asked before each request, because a local server may make its token after the run began. With
    `check_first` nothing is sent on a new connection until a Collage Monitor server has answered there, for an
    address that was only guessed.
    """

    def __init__(
        self, address: str, token: Callable[[], str | None], limits: DeliveryLimits, *, check_first: bool = False
    ) -> None:
        self._address = address
        self._token = token
        self._limits = limits
        self._check_first = check_first
        self._client: httpx.Client | None = None
        self._unknown_statistics: set[str] = set()

    def send(self, envelope: Envelope, wait: Callable[[float], bool]) -> BatchAnswer:
        """Deliver one message, repeating it for `retry_seconds` while the server is away or busy."""
        backoff = Backoff(0.1, 2.0)
        end = time.monotonic() + self._limits.retry_seconds
        while True:
            try:
                return self._send_once(envelope)
            except (ServerUnreachable, Unavailable) as error:
                pause = backoff.pause(getattr(error, "retry_after_seconds", None))
                if time.monotonic() + pause > end or wait(pause):
                    raise

    def answers(self) -> bool:
        """Whether a Collage Monitor server answers at the address; quick, without a retry."""
        with contextlib.suppress(httpx.HTTPError, WireError, OSError, ServerUnreachable):
            response = self._opened().get("/healthz", timeout=self._limits.connect_timeout_seconds)
            return response.is_success and bool(decode_message(response.content, Health, JSON).version)
        return False

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _send_once(self, envelope: Envelope) -> BatchAnswer:
        method, path = _route(envelope)
        response = self._request(method, path, envelope.encoded_body(), reused=self._client is not None)
        if not response.is_success:
            raise _refusal(response)
        if envelope.kind == "stream":
            self._tell_unknown_statistics(response)
        if envelope.kind != "reports":
            return _NO_REPORTS
        try:
            return decode_message(response.content, BatchAnswer, JSON)
        except WireError as error:
            # Nothing counts as acknowledged before the server says so.
            raise Unavailable(
                f"{self._address}{path}: an answer that is not a batch answer: {error}", status=response.status_code
            ) from error

    def _tell_unknown_statistics(self, response: httpx.Response) -> None:
        """Log each statistic that the server's catalogue lacks, once; the server drops its totals."""
        with contextlib.suppress(WireError):
            unknown = decode_message(response.content, Stream, JSON).unknown_statistics
            if fresh := [name for name in unknown if name not in self._unknown_statistics]:
                self._unknown_statistics.update(fresh)
                _LOG.warning("the server does not know these statistics and leaves them out: %s", ", ".join(fresh))

    def _request(self, method: str, path: str, body: bytes, *, reused: bool) -> httpx.Response:
        try:
            headers = self._headers()
            if len(body) > _COMPRESSED_FROM_BYTES:
                headers["content-encoding"] = "gzip"
                content = gzip.compress(body, compresslevel=1)
            else:
                content = body
            return self._connected().request(method, path, content=content, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            self.close()
            if reused and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
                # The server closes idle connections; that says nothing about whether it is there.
                return self._request(method, path, body, reused=False)
            raise ServerUnreachable(f"{self._address}: {error or type(error).__name__}") from error

    def _connected(self) -> httpx.Client:
        if self._client is None and self._check_first and not self.answers():
            self.close()
            raise ServerUnreachable(f"no server answers at {self._address}")
        return self._opened()

    def _opened(self) -> httpx.Client:
        if self._client is None:
            # Keep the client's line per request out of the training's log.
            logging.getLogger("httpx").addFilter(_is_not_ours)
            self._client = httpx.Client(
                base_url=self._address,
                timeout=httpx.Timeout(
                    self._limits.answer_timeout_seconds, connect=self._limits.connect_timeout_seconds
                ),
                # A proxy named in the environment must not stand between two processes of one machine.
                trust_env=not is_loopback(self._address),
                verify=trusted_certificates(self._address),
            )
        return self._client

    def _headers(self) -> dict[str, str]:
        token = self._token()
        headers = {"content-type": MSGPACK, "accept": JSON}
        return headers | {"authorization": f"Bearer {token}"} if token else headers


def dashboard_of(server_url: str) -> str | None:
    """A dashboard that shows what is sent to the server: one of this machine that answers, or the server's own."""
    found = local_server()
    known = found.dashboard_url if found is not None and found.server_url == server_url else None
    if known is None and server_url == DEFAULT_SERVER_URL:
        known = DEFAULT_DASHBOARD_URL
    here, log = threading.get_ident(), logging.getLogger("httpx")
    log.addFilter(is_of_others := lambda record: record.thread != here)
    try:
        return known if known is not None and _answers(known) else named_dashboard(server_url)
    finally:
        log.removeFilter(is_of_others)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=0.5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != WORKER_THREAD_NAME


def _route(envelope: Envelope) -> tuple[str, str]:
    run = quoted(envelope.run_id)
    routes = {
        "run": ("POST", f"/api/v1/projects/{quoted(envelope.project)}/runs"),
        "attempt": ("POST", f"/api/v1/runs/{run}/attempts"),
        "stream": ("POST", f"/api/v1/runs/{run}/streams"),
        "reports": ("POST", f"/api/v1/streams/{quoted(envelope.stream_id)}/reports"),
        "update": ("PATCH", f"/api/v1/runs/{run}"),
    }
    return routes[envelope.kind]


def _refusal(response: httpx.Response) -> ServerRefusal:
    error = refusal(response)
    if error.status in {408, 425} or error.status < 400:
        # A redirect is a proxy's word, not the server's: the data waits, as for a time-out.
        return Unavailable(str(error), status=error.status, code=error.code)
    return error
