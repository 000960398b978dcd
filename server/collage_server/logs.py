"""Logs of a server process: one line a record on standard error, as text or JSON, without secrets.

Nothing is set up at import; `serve` calls `configure`. Requests are logged by `collage_server.web.middleware`:
refused ones at INFO, failed ones at WARNING, all others at DEBUG. A limited number of refusals per second is
written, and the others are counted: otherwise callers without a token could fill a disk with them.

Names of a record's fields (`time`, `level`, `logger`, `message`, `request_id` and those of requests) are what
collectors parse: `docs/operations.md` (`tests/server/test_logs.py`).
"""

from __future__ import annotations

import logging
import re
import sys
import textwrap
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from structlog.processors import EventRenamer, JSONRenderer, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict, Processor

__all__ = ["REQUEST_ID", "configure"]

REQUEST_ID: Final[ContextVar[str | None]] = ContextVar("collage_request_id", default=None)
"""The request that the running code works for; threads of the pool inherit it."""
_REQUEST_FIELDS: Final = ("method", "path", "status", "duration_seconds", "actor", "client")
"""What a record about a request carries beside its message."""
_SECRETS: Final = re.compile(r"collage_[A-Za-z0-9_-]{43}|(?i:bearer)\s+[^\s\"',]+")
_REFUSALS: Final = ("collage_server.requests", "collage_server.web.protocol")
_REFUSALS_A_SECOND: Final = 20
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")


def configure(form: str, level: str, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Send every record of this process to standard error (or `stream`), in `form` "text" or "json".

    Occurrences of `secrets`, of tokens, and of bearer headers are masked, wherever they come from.
    """
    mask = _masking([secret for secret in secrets if secret])
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_RefusalLimit())
    handler.setFormatter(
        ProcessorFormatter(
            processors=[
                _moment_and_request,
                add_log_level,
                add_logger_name,
                EventRenamer("message"),
                ExtraAdder(_REQUEST_FIELDS),
                format_exc_info,
                ProcessorFormatter.remove_processors_meta,
                mask,
                *([JSONRenderer(default=str)] if form == "json" else [_line, _escaped]),
            ]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Warnings of numpy and others, which would write lines of their own.
    logging.captureWarnings(True)
    # alembic logs at INFO at every start, even when there is nothing to migrate.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class _RefusalLimit(logging.Filter):
    """Lets so many refusals a second through, by the records' times; the next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._written, self._left_out = 0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno != logging.INFO or record.name not in _REFUSALS:
            return True
        if int(record.created) != self._second:
            self._second, self._written = int(record.created), 0
        if self._written >= _REFUSALS_A_SECOND:
            self._left_out += 1
            return False
        self._written += 1
        if self._left_out:
            record.msg = f"{record.msg} ({self._left_out} refusals before it are left out)"
            self._left_out = 0
        return True


def _moment_and_request(_logger: Any, _level: str, entry: EventDict) -> EventDict:
    moment = datetime.fromtimestamp(entry["_record"].created, UTC).isoformat(timespec="milliseconds")
    return {"time": moment.replace("+00:00", "Z"), "request_id": REQUEST_ID.get(), **entry}


def _line(_logger: Any, _level: str, entry: EventDict) -> str:
    """TIME LEVEL LOGGER [request id] message; line breaks in it cannot start a record, a traceback is indented."""
    named = f" [{entry['request_id']}]" if entry["request_id"] else ""
    message = entry["message"].replace("\n", "\\n")
    line = f"{entry['time']} {entry['level'].upper()} {entry['logger']}{named} {message}"
    return line + textwrap.indent("\n" + entry["exception"], "  ") if "exception" in entry else line


def _escaped(_logger: Any, _level: str, text: Any) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _masking(secrets: Collection[str]) -> Processor:
    """Masks each text of a record as it was said: in a rendered line a secret's characters may be escaped."""

    def masked(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for secret in secrets:
            value = value.replace(secret, "***")
        return _SECRETS.sub("***", value)

    def mask(_logger: Any, _level: str, entry: EventDict) -> EventDict:
        return {name: masked(value) for name, value in entry.items()}

    return mask
