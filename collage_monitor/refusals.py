"""Translates a server's refusal: an error of its kind, and the setting to change.

The agent's `transport/sender.py` keeps messages refused as `Unavailable` or `NotAuthorised`, and sends them
again; `transport/http.py` also retries `Unavailable` at once.
"""

from __future__ import annotations

import httpx
import msgspec

from collage_monitor import wire
from collage_monitor.errors import NotAuthorised, NotFound, ServerRefusal, Unavailable

__all__ = ["refusal"]


def refusal(response: httpx.Response) -> ServerRefusal:
    """The error behind a response of 4xx or 5xx, whether or not its body has the one error shape."""
    try:
        body = wire.decode_message(response.content, wire.ErrorAnswer, wire.JSON).error
    except (ValueError, msgspec.MsgspecError):
        # A proxy's page, or another server's.
        said = f"{response.request.url.join('/')} answers {response.status_code} {response.reason_phrase}"
        body = wire.ErrorBody(
            code="unknown", message=f"{said}, not as a Collage Monitor server does; is the address right?"
        )
    status, message = response.status_code, body.message
    kind: type[ServerRefusal] = ServerRefusal
    if status in {401, 403}:
        kind, message = NotAuthorised, _about_the_token(response, message)
    elif status in {404, 410}:
        kind = NotFound
    elif status == 429 or status >= 500:
        kind = Unavailable
    return kind(
        message,
        status=status,
        code=body.code,
        field=body.field,
        limit=body.limit,
        request_id=body.request_id,
        retry_after_seconds=_seconds(response.headers.get("Retry-After")),
    )


def _about_the_token(response: httpx.Response, message: str) -> str:
    """Name the variable to set: the server's own message is meant for programmers."""
    address = str(response.request.url.join("/")).rstrip("/")
    if response.status_code == 403:
        return f"{address} does not let this token do that ({message}): set COLLAGE_TOKEN to one that may"
    if "Authorization" in response.request.headers:
        return f"{address} does not know this token: set COLLAGE_TOKEN to one that the server gave out"
    return (
        f"{address} asks for a token: set COLLAGE_TOKEN to one that it gave out, or COLLAGE_DIR to its data folder "
        "if it runs on this machine"
    )


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(float(value), 0.0)
    except ValueError:
        return None
