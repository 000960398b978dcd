"""Errors of the contract.

CollageError
├── CatalogueError        a name that no catalogue has
├── WireError             a message that cannot be decoded or breaks a limit
├── ServerUnreachable     no answer from the server
└── ServerRefusal         an answer in the one JSON error shape
    ├── NotAuthorised     401, 403
    ├── NotFound          404, 410
    └── Unavailable       429, 5xx: worth another try
"""

from __future__ import annotations

__all__ = [
    "CatalogueError",
    "CollageError",
    "NotAuthorised",
    "NotFound",
    "ServerRefusal",
    "ServerUnreachable",
    "Unavailable",
    "WireError",
]


class CollageError(Exception):
    """Base class of every error that the project raises on purpose."""


class CatalogueError(CollageError, KeyError):
    """A metric, statistic, strategy or alert name that the catalogue does not have."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class WireError(CollageError, ValueError):
    """A message that cannot be decoded, or a value beyond a stated limit.

    `field` names the offending field ("" for the whole body), `limit` the bound that was broken, if any.
    """

    def __init__(self, message: str, *, field: str = "", limit: float | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.limit = limit


class ServerUnreachable(CollageError):
    """The server did not answer: not started, wrong address, or a network failure."""


class ServerRefusal(CollageError):
    """The server answered with an error; the attributes mirror the JSON error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "unknown",
        field: str | None = None,
        limit: float | None = None,
        request_id: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        self.limit = limit
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds


class NotAuthorised(ServerRefusal):
    """401 or 403: the token is missing, unknown, or not allowed to do this."""


class NotFound(ServerRefusal):
    """404 or 410: no such project, run, stream or layer for this token."""


class Unavailable(ServerRefusal):
    """429 or 5xx: the same request may succeed later."""
