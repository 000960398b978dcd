"""Checking reports against what their stream declared: a bad report is named, its neighbours are kept.

Streams that this process has seen are remembered, so that a report costs no query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import Lock
from typing import Final

from cachetools import LRUCache

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.store.records import StreamRecord

__all__ = ["StreamRegistry", "check_batch"]

_SCALARS: Final = wire.LIMITS["scalars_per_report"]
_NAME: Final = wire.LIMITS["name_characters"]
_KEPT: Final = 20_000


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
