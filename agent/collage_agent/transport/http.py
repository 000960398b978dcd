"""Sending to the server over HTTP: one connection, repeated with back-off, refusals told apart from absences."""

from __future__ import annotations

import contextlib
import gzip
import logging
import random
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import httpx
import tenacity

from collage_agent.settings import DeliveryLimits, is_loopback
from collage_agent.transport.envelope import WORKER_THREAD_NAME, Envelope
from collage_monitor.client import refusal
from collage_monitor.errors import CollageError, ServerRefusal, ServerUnreachable, Unavailable, WireError
from collage_monitor.wire import JSON, MSGPACK, BatchAnswer, Health, decode_message

__all__ = ["HttpTransport"]

_COMPRESSED_FROM_BYTES: Final = 6 * 2**20
"""Longer bodies are compressed: the server takes 16 MiB as sent, 64 MiB behind an encoding."""
_WORTH_ANOTHER_TRY: Final = (ServerUnreachable, Unavailable)
_NO_REPORTS: Final = BatchAnswer(accepted=0, duplicates=0)


class HttpTransport:
    """POSTs messages to one server with a bearer token.

    `token` is asked before each request, because a local server may make its token after the run began. With
    `check_first` nothing is sent on a new connection before a Collage Monitor server has answered there: for an
    address that nobody gave.
    """

    def __init__(
        self, address: str, token: Callable[[], str | None], limits: DeliveryLimits, *, check_first: bool = False
    ) -> None:
        self._address = address
        self._token = token
        self._limits = limits
        self._check_first = check_first
        self._client: httpx.Client | None = None
        # The training's own random numbers must come out as they would without the agent.
        self._random = random.Random()

    def send(self, envelope: Envelope, wait: Callable[[float], bool]) -> BatchAnswer:
        """Deliver one message, repeating it for `retry_seconds` while the server is away or busy."""
        longest = tenacity.wait_exponential(multiplier=0.1, max=2.0)

        def pause(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            asked = error.retry_after_seconds if isinstance(error, Unavailable) else None
            return max(self._random.uniform(0.0, longest(state)), asked or 0.0)

        def sleep(seconds: float) -> None:
            if wait(seconds):
                raise _Ending

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_WORTH_ANOTHER_TRY),
            wait=pause,
            stop=tenacity.stop_before_delay(self._limits.retry_seconds),
            sleep=sleep,
            reraise=True,
        )
        last: CollageError | None = None
        try:
            for attempt in retrying:
                with attempt:
                    try:
                        return self._send_once(envelope)
                    except _WORTH_ANOTHER_TRY as error:
                        last = error
                        raise
        except _Ending:
            pass
        raise last or ServerUnreachable(f"{self._address} did not answer")

    def answers(self) -> bool:
        """Whether a Collage Monitor server answers at the address; quick, without a retry."""
        with contextlib.suppress(httpx.HTTPError, WireError, OSError):
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
        if envelope.kind != "reports":
            return _NO_REPORTS
        try:
            return decode_message(response.content, BatchAnswer, JSON)
        except WireError as error:
            # Without the server's word nothing is acknowledged.
            raise Unavailable(
                f"{self._address}{path}: an answer that is not a batch answer: {error}", status=response.status_code
            ) from error

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
            # A line per request is nothing that a training log should hold.
            logging.getLogger("httpx").addFilter(_is_not_ours)
            self._client = httpx.Client(
                base_url=self._address,
                timeout=httpx.Timeout(
                    self._limits.answer_timeout_seconds, connect=self._limits.connect_timeout_seconds
                ),
                # A proxy named in the environment must not stand between two processes of one machine.
                trust_env=not is_loopback(self._address),
            )
        return self._client

    def _headers(self) -> dict[str, str]:
        token = self._token()
        headers = {"content-type": MSGPACK, "accept": JSON}
        return headers | {"authorization": f"Bearer {token}"} if token else headers


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != WORKER_THREAD_NAME


class _Ending(Exception):
    """The run is ending: no more waiting."""


def _route(envelope: Envelope) -> tuple[str, str]:
    run = quote(envelope.run_id, safe="")
    routes = {
        "run": ("POST", f"/api/v1/projects/{quote(envelope.project, safe='')}/runs"),
        "attempt": ("POST", f"/api/v1/runs/{run}/attempts"),
        "stream": ("POST", f"/api/v1/runs/{run}/streams"),
        "reports": ("POST", f"/api/v1/streams/{quote(envelope.stream_id, safe='')}/reports"),
        "update": ("PATCH", f"/api/v1/runs/{run}"),
    }
    return routes[envelope.kind]


def _refusal(response: httpx.Response) -> ServerRefusal:
    error = refusal(response)
    if error.status in {408, 425} or error.status < 400:
        # A redirect is a proxy's word, not the server's: the data waits, as for a time-out.
        return Unavailable(str(error), status=error.status, code=error.code)
    return error
