"""Following a curve: what has come since an earlier answer, or all of it again where what was told has changed.

A cursor holds the run's revision, the last step that was told, and a digest of the stored numbers up to it. Steps
are told once every rank that is waited for has reached them. A report that comes late, to whichever server, changes
the digest, and so do a newer attempt and retention: nothing is ever skipped.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec
import numpy as np

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.store import Points, RunRevision, ScalarPoints, Selection

__all__ = ["FollowedCurve", "follow"]

_DIGEST_BYTES = 16


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    step: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
    told: bytes
    revision: bytes


_DECODE: Final = msgspec.msgpack.Decoder(_Cursor).decode


@dataclass(frozen=True)
class FollowedCurve:
    """One question about one run: `read` gives the stored numbers, `answer` the curve, of a selection.

    `complete` is the newest step that every rank has reached; None: whatever was read is as complete as it gets.
    """

    read: Callable[[Selection], Points | ScalarPoints]
    answer: Callable[[Selection], wire.Series]
    complete: Callable[[], int | None]


def follow(curve: FollowedCurve, selection: Selection, cursor: str, revision: RunRevision) -> wire.Series:
    """The curve since the answer that gave `cursor`; the whole one where that is empty or what it told has changed.

    Raises:
        Unprocessable: the cursor is not one of ours.
    """
    now = _digest([repr(revision).encode()])
    known = _decoded(cursor) if cursor else None
    if known is not None and known.revision == now:
        nothing = replace(selection, first_step=known.step + 1, last_step=known.step)
        return msgspec.structs.replace(curve.answer(nothing), cursor=cursor, continues=True)
    complete = curve.complete()
    ends = [step for step in (selection.last_step, complete) if step is not None]
    held = curve.read(replace(selection, last_step=min(ends, default=None), points=None))
    last = int(held.steps[-1]) if len(held.steps) else -1
    goes_on = known is not None and known.step <= last and _told(held, known.step) == known.told
    first = selection.first_step
    if known is not None and goes_on:
        first = max(known.step + 1, first or 0)
    series = curve.answer(replace(selection, first_step=first, last_step=last))
    return msgspec.structs.replace(
        series, cursor=_encoded(_Cursor(last, _told(held, last), now)), continues=goes_on
    )


def _told(held: Points | ScalarPoints, last: int) -> bytes:
    """A digest of the numbers up to a step."""
    end = int(np.searchsorted(held.steps, last, side="right"))
    if isinstance(held, ScalarPoints):
        return _digest([array[:end].tobytes() for array in (held.steps, held.times, held.values)])
    parts = [array[:end].tobytes() for array in (held.steps, held.times, held.ranks, held.counts)]
    for key, values in sorted(held.totals.items()):
        # What nobody reported is absent once it is sealed.
        if not np.isnan(values[:end]).all():
            parts += [key.encode(), values[:end].tobytes()]
    return _digest(parts)


def _digest(parts: list[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _encoded(cursor: _Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(cursor)).decode()


def _decoded(text: str) -> _Cursor:
    try:
        return _DECODE(base64.urlsafe_b64decode(text.encode()))
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise Unprocessable(
            f"cursor {text!r} is not one of this server's; start again with an empty one", field="cursor"
        ) from error
