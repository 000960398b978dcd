"""Errors of the server, each with the status and code that the JSON error shape carries.

ServerError
├── BadRequest            400  the body cannot be decoded
├── Unauthorised          401  no token, or an unknown one
├── Forbidden             403  this role, project, host or origin may not
├── NotFound              404  no such run, stream, layer or route
├── Conflict              409  it exists already, and differs
├── Gone                  410  the run was deleted
├── TooLarge              413  a body beyond its limit
├── UnsupportedMediaType  415  a content type or encoding that is not spoken here
├── Unprocessable         422  well-formed, but a value is not acceptable
│   ├── SignInRefused     422  what a provider says of a person does not open this server
│   └── NeedsTooMuch      422  an answer that no budget of this server could hold
├── JournalFull           429  too much waits to be sealed: the same reports may be taken later
├── TooManyFailures       429  unknown tokens, again and again from one address
├── HeadTooLarge          431  request line and headers beyond their limit
├── Busy                  503  the server cannot do this now: the same request may succeed later
│   ├── DatabaseAway      503  the database does not answer; the log says why
│   └── Damaged           503  something stored differs from what was written; other steps answer
├── StoreUnusable         500  the database cannot be opened, or its file was moved while the server ran
├── UnsafeAddress              a message's target leads to an address that none may go to; never an answer
└── DamagedFile                an archived file cannot be read as it was written; answered as Busy

A status and a code are fixed, because clients and agents act on them (`collage_monitor/refusals.py`): an agent
keeps and sends again what is refused with 401, 403, 429 or 5xx. Words are free (`tests/server/test_errors.py` goes
over all routes).
"""

from __future__ import annotations

from typing import ClassVar

from collage_monitor.errors import CollageError

__all__ = [
    "BadRequest",
    "Busy",
    "Conflict",
    "Damaged",
    "DamagedFile",
    "DatabaseAway",
    "Forbidden",
    "Gone",
    "HeadTooLarge",
    "JournalFull",
    "NeedsTooMuch",
    "NotFound",
    "ServerError",
    "SignInRefused",
    "StoreUnusable",
    "TooLarge",
    "TooManyFailures",
    "Unauthorised",
    "Unprocessable",
    "UnsafeAddress",
    "UnsupportedMediaType",
    "unknown_run",
    "unknown_stream",
]


class ServerError(CollageError):
    """An answer that is an error: `field` names the offending field, `limit` the bound that it broke."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        limit: float | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class BadRequest(ServerError):
    """The body cannot be decoded."""

    status = 400
    code = "bad_request"


class Unauthorised(ServerError):
    """No token, or an unknown one."""

    status = 401
    code = "unauthorised"


class Forbidden(ServerError):
    """This role, project, host or origin may not."""

    status = 403
    code = "forbidden"


class NotFound(ServerError):
    """No such run, stream, layer or route."""

    status = 404
    code = "not_found"


class Conflict(ServerError):
    """It exists already, and differs."""

    status = 409
    code = "conflict"


class Gone(ServerError):
    """The run was deleted; its id is never used again."""

    status = 410
    code = "gone"


class TooLarge(ServerError):
    """A body beyond its limit."""

    status = 413
    code = "too_large"


class TooManyFailures(ServerError):
    """Unknown tokens, again and again from one address."""

    status = 429
    code = "too_many_failures"


class HeadTooLarge(ServerError):
    """Request line and headers beyond their limit."""

    status = 431
    code = "head_too_large"


class UnsupportedMediaType(ServerError):
    """A content type or encoding that is not spoken here."""

    status = 415
    code = "unsupported_media_type"


class Unprocessable(ServerError):
    """Well-formed, but a value is not acceptable."""

    status = 422
    code = "unprocessable"


class SignInRefused(Unprocessable):
    """The provider's answer about a person gives no access: a forged or stale token, or no group with a role."""

    code = "sign_in_refused"


class NeedsTooMuch(Unprocessable):
    """The question or evaluation needs more memory than this server has for it."""

    code = "needs_too_much"


class JournalFull(ServerError):
    """Too many reports wait to be sealed; the same ones may be accepted after Retry-After."""

    status = 429
    code = "journal_full"


class Busy(ServerError):
    """The server cannot do this now; the same request may succeed after Retry-After."""

    status = 503
    code = "busy"


class DatabaseAway(Busy):
    """The database cannot do this now; the same request may succeed after Retry-After."""


class Damaged(Busy):
    """Something stored differs from what was written: it is named, and the answer waits until it is healed."""

    code = "damaged"


class StoreUnusable(ServerError):
    """The database cannot be opened, is newer than this server, or its file was moved while the server ran."""

    code = "store_unusable"


class UnsafeAddress(ServerError):
    """A message's target leads to an address that no message may go to; logged, never an answer."""

    code = "unsafe_address"


class DamagedFile(ServerError):
    """An archived file cannot be read as it was written; its reader answers with Busy."""

    code = "damaged_file"


def unknown_run(run_id: str) -> NotFound:
    """The answer for a run that was never seen, and word for word for one of another project."""
    return NotFound(f"no run {run_id!r}; GET /api/v1/runs lists them", field="run_id")


def unknown_stream(stream_id: str) -> NotFound:
    """The answer for a stream that was never seen, and word for word for one of another project."""
    return NotFound(f"no stream {stream_id!r}; POST /api/v1/runs/RUN/streams registers one", field="stream_id")
