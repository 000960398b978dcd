"""Bodies as messages: what cannot be decoded, or holds more than one message may, is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from collage_monitor import wire
from collage_monitor.errors import WireError
from collage_server.errors import BadRequest, TooLarge, Unprocessable

__all__ = ["LARGE_BYTES", "Body", "accepted_indices", "decoded_batch", "decoded_message", "merge_rejected"]

Body = bytes | bytearray
LARGE_BYTES: Final = 64 * 2**10
"""Smaller bodies are decoded and checked in less time than a thread takes."""
_Message = TypeVar("_Message")
_LIMIT: Final = wire.LIMITS["reports_per_batch"]


def decoded_batch(data: Body, content_type: str) -> tuple[wire.ReportBatch, list[wire.RejectedReport]]:
    """The batch in a body, and its reports that cannot be decoded.

    Raises:
        BadRequest, Unprocessable: no report can be decoded.
        TooLarge: more reports or gaps than one batch may hold.
    """
    try:
        batch, refused = _decoded(data, content_type)
    except WireError as error:
        if error.field in ("reports", "gaps") and error.limit == _LIMIT:
            raise _too_many(error.field) from error
        raise _unreadable(error) from error
    for field in ("reports", "gaps"):
        if len(getattr(batch, field)) > _LIMIT:
            raise _too_many(field)
    return batch, refused


def _decoded(data: Body, content_type: str) -> tuple[wire.ReportBatch, list[wire.RejectedReport]]:
    # At once, a batch of 13 MB would hold the interpreter for 0.1 CPU-seconds: no other thread gets on meanwhile.
    if content_type == wire.JSON or len(data) <= LARGE_BYTES:
        with suppress(WireError):
            return wire.decode_batch(data, content_type), []
    return wire.decode_batch_singly(data, content_type)


def accepted_indices(count: int, refused: Sequence[wire.RejectedReport]) -> list[int]:
    """Indices, in a batch of `count` reports, of those not refused."""
    without = {entry.index for entry in refused}
    return [place for place in range(count) if place not in without]


def merge_rejected(
    later: Sequence[wire.RejectedReport], refused: Sequence[wire.RejectedReport], kept: int
) -> list[wire.RejectedReport]:
    """All that were refused, by index in the batch that was sent: `later` ones are numbered in the `kept` of it."""
    places = accepted_indices(kept + len(refused), refused)
    moved = [msgspec.structs.replace(entry, index=places[entry.index]) for entry in later]
    return sorted([*moved, *refused], key=lambda entry: entry.index)


def _too_many(field: str) -> TooLarge:
    return TooLarge(f"more than {_LIMIT} {field} in one batch; send several", field=field, limit=_LIMIT)


def decoded_message(data: Body, kind: type[_Message], content_type: str) -> _Message:
    """The message in a body.

    Raises:
        BadRequest: not decodable at all.
        Unprocessable: decodable, but a field is of a wrong type or beyond its bound.
    """
    try:
        return wire.decode_message(data, kind, content_type)
    except WireError as error:
        raise _unreadable(error) from error


def _unreadable(error: WireError) -> BadRequest | Unprocessable:
    """The answer to a body that the wire refuses: 422 when a field can be named, else 400."""
    if error.field:
        return Unprocessable(str(error), field=error.field, limit=error.limit)
    return BadRequest(str(error), field="body", limit=error.limit)
