"""Decodes bodies, and checks their reports against the stream's declaration: bad ones are named, others kept.

Streams that this process has seen are remembered, so that a report costs no query.

`api/reports.py` calls it before the writer. Which reports are bad is fixed by the contract's `LIMITS` and `Report`;
that a bad one never takes its neighbours along is tested in `tests/server/test_ingest.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, TypeVar

import msgspec
from cachetools import LRUCache

from collage_monitor import wire
from collage_monitor.errors import WireError
from collage_server.errors import BadRequest, TooLarge, Unprocessable
from collage_server.store.records import StreamRecord

__all__ = [
    "Body",
    "LARGE_BYTES",
    "StreamRegistry",
    "accepted_indices",
    "check_batch",
    "decoded_batch",
    "decoded_message",
    "merge_rejected",
]

Body = bytes | bytearray
LARGE_BYTES: Final = 64 * 2**10
"""Smaller bodies are decoded and checked in less time than a thread takes."""
_Message = TypeVar("_Message")
_REPORTS: Final = wire.LIMITS["reports_per_batch"]
_SCALARS: Final = wire.LIMITS["scalars_per_report"]
_NAME: Final = wire.LIMITS["name_characters"]
_KEPT: Final = 20_000


def decoded_batch(data: Body, content_type: str) -> tuple[wire.ReportBatch, list[wire.RejectedReport]]:
    """The batch in a body, and its reports that cannot be decoded.

    Raises:
        BadRequest, Unprocessable: no report can be decoded.
        TooLarge: more reports or gaps than one batch may hold.
    """
    try:
        batch, refused = _decoded(data, content_type)
    except WireError as error:
        if error.field in ("reports", "gaps") and error.limit == _REPORTS:
            raise _too_many(error.field) from error
        raise _unreadable(error) from error
    for field in ("reports", "gaps"):
        if len(getattr(batch, field)) > _REPORTS:
            raise _too_many(field)
    return batch, refused


def _decoded(data: Body, content_type: str) -> tuple[wire.ReportBatch, list[wire.RejectedReport]]:
    # Decoded at once, a batch of 13 MB would keep other threads waiting for 0.1 s.
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
    return TooLarge(f"more than {_REPORTS} {field} in one batch; send several", field=field, limit=_REPORTS)


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


class _Refusal(Exception):
    """Why one report is refused."""

    def __init__(self, code: str, message: str, field: str, limit: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.field, self.limit = code, message, field, limit


def check_batch(
    batch: wire.ReportBatch, stream: StreamRecord
) -> tuple[list[wire.Report], list[wire.RejectedReport]]:
    """The acceptable reports, and the others with their reasons.

    Raises:
        Unprocessable: a gap that ends before it begins.
    """
    for gap in batch.gaps:
        if gap.last_seq < gap.first_seq:
            raise Unprocessable(f"gaps: {gap.first_seq} to {gap.last_seq} ends before it begins", field="gaps")
    kept, rejected = [], []
    for index, report in enumerate(batch.reports):
        try:
            _check(report, stream)
            kept.append(report)
        except _Refusal as refusal:
            rejected.append(
                wire.RejectedReport(
                    index=index,
                    seq=report.seq,
                    code=refusal.code,
                    message=refusal.message,
                    field=refusal.field,
                    limit=refusal.limit,
                )
            )
    return kept, rejected


def _check(report: wire.Report, stream: StreamRecord) -> None:
    if not math.isfinite(report.time):
        raise _Refusal("bad_value", f"time {report.time} is not a Unix time in seconds", "time")
    if len(report.scalars) > _SCALARS:
        raise _Refusal("too_many", f"{len(report.scalars)} scalars, at most {_SCALARS}", "scalars", _SCALARS)
    for name in report.scalars:
        if not 0 < len(name) <= _NAME or "\0" in name:
            raise _Refusal(
                "bad_name",
                f"scalar names have 1 to {_NAME} characters, none of them NUL: {name[:40]!r}",
                "scalars",
                _NAME,
            )
    if report.statistic_count or report.layer_count:
        _check_declared(report, stream)
    if report.statistics is not None or report.model is not None:
        _check_totals(report)


def _check_declared(report: wire.Report, stream: StreamRecord) -> None:
    declared = (("statistic_count", len(stream.statistics)), ("layer_count", len(stream.layers)))
    for field, most in declared:
        count = getattr(report, field)
        if count > most:
            raise _Refusal(
                "undeclared",
                f"{field} is {count}, but the stream declares {most}; "
                f"POST /api/v1/runs/{stream.run_id}/streams again with all of them first",
                field,
                most,
            )


def _check_totals(report: wire.Report) -> None:
    if report.statistic_count == 0:
        raise _Refusal("missing", "statistic_count is 0: leave statistics and model out", "statistic_count")
    if report.model is None:
        raise _Refusal("missing", "statistics without model: send the model's vector beside them", "model")
    _check_size("model", report.model, report.statistic_count)
    if report.statistics is not None:
        _check_size("statistics", report.statistics, report.statistic_count * report.layer_count)


def _check_size(field: str, data: bytes, numbers: int) -> None:
    if len(data) != 8 * numbers:
        raise _Refusal(
            "bad_size",
            f"{field} has {len(data)} bytes, but {numbers} float64 take {8 * numbers}",
            field,
            8 * numbers,
        )


class StreamRegistry:
    """A bounded cache of stream records. Thread-safe; `load` asks the store."""

    def __init__(self, load: Callable[[str], StreamRecord]) -> None:
        self._load = load
        self._records: LRUCache[str, StreamRecord] = LRUCache(_KEPT)
        self._lock = Lock()

    def cached(self, stream_id: str) -> StreamRecord | None:
        """The record, if this process has it."""
        with self._lock:
            return self._records.get(stream_id)

    def load(self, stream_id: str) -> StreamRecord:
        """The record, fresh from the store.

        Raises:
            NotFound: no such stream.
        """
        record = self._load(stream_id)
        with self._lock:
            self._records[stream_id] = record
        return record

    def forget(self, stream_id: str) -> None:
        """Drop a stream that has declared more."""
        with self._lock:
            self._records.pop(stream_id, None)

    def forget_run(self, run_id: str) -> None:
        """Drop the streams of a run that was deleted."""
        with self._lock:
            for stream_id in [key for key, record in self._records.items() if record.run_id == run_id]:
                del self._records[stream_id]
