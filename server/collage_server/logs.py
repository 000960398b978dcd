"""Logs of a server process: one line a record on standard error, as text or JSON, without secrets.

Nothing is set up at import; `serve` calls `configure`. Requests are logged by `collage_server.web.middleware`:
refused ones at INFO, failed ones at WARNING, all others at DEBUG.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final, TextIO

__all__ = ["FIELDS", "REQUEST_ID", "configure"]

REQUEST_ID: Final[ContextVar[str | None]] = ContextVar("collage_request_id", default=None)
"""The request that the running code works for; threads of the pool inherit it."""
FIELDS: Final = ("method", "path", "status", "duration_seconds", "actor")
"""What a record about a request carries beside its message."""
_SECRETS: Final = re.compile(r"collage_[A-Za-z0-9_-]{43}|(?i:bearer)\s+[^\s\"',]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")


def configure(form: str, level: str, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Send every record of this process to standard error (or `stream`), in `form` "text" or "json".

    Occurrences of `secrets`, of tokens, and of bearer headers are masked, wherever they come from.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    masked = tuple(secret for secret in secrets if secret)
    handler.setFormatter(_JsonLines(masked) if form == "json" else _Text(masked))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # A migration says what it does at INFO, and at every start that there is none.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class _Text(logging.Formatter):
    """TIME LEVEL LOGGER [request id] message; line breaks in it cannot start a record, a traceback is indented."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        super().__init__()
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\n", "\\n")
        request_id = getattr(record, "request_id", None) or REQUEST_ID.get()
        named = f" [{request_id}]" if request_id else ""
        line = f"{_moment(record.created)} {record.levelname} {record.name}{named} {message}"
        if record.exc_info:
            line += textwrap.indent("\n" + self.formatException(record.exc_info), "  ")
        return _CONTROL.sub(lambda found: repr(found[0])[1:-1], _masked(line, self._secrets))


class _JsonLines(logging.Formatter):
    """A JSON object a line."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        super().__init__()
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None) or REQUEST_ID.get(),
        }
        entry |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _masked(json.dumps(entry, ensure_ascii=True, default=str), self._secrets)


def _masked(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return _SECRETS.sub("***", text)


def _moment(seconds: float) -> str:
    fraction = int(seconds * 1000) % 1000
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{fraction:03d}Z"
