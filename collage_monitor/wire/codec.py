"""Encoding and decoding messages: msgpack for machines, JSON for people; every failure is a WireError.

In JSON a report's blocks are nested lists (`statistics` [statistic][layer], `model` [statistic]) and non-finite
numbers are strings.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from collage_monitor.errors import WireError
from collage_monitor.wire.messages import Gap, Index, Report, ReportBatch
from collage_monitor.wire.numbers import Number, block_from_bytes, block_to_bytes, from_number, to_number

__all__ = ["JSON", "MSGPACK", "decode_batch", "decode_message", "encode_batch", "encode_json", "encode_message"]

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

_Message = TypeVar("_Message")
_ENCODE_MSGPACK = msgspec.msgpack.Encoder().encode
_ENCODE_JSON = msgspec.json.Encoder().encode
_DECODE_BATCH = msgspec.msgpack.Decoder(ReportBatch).decode


class _JsonReport(msgspec.Struct, kw_only=True, frozen=True):
    seq: Index
    step: Index
    time: Number
    scalars: dict[str, Number] = msgspec.field(default_factory=dict)
    statistic_count: Index = 0
    layer_count: Index = 0
    statistics: list[list[Number]] | None = None
    model: list[Number] | None = None


class _JsonBatch(msgspec.Struct, kw_only=True, frozen=True):
    reports: list[_JsonReport]
    gaps: list[Gap] = msgspec.field(default_factory=list)


_DECODE_JSON_BATCH = msgspec.json.Decoder(_JsonBatch).decode


def encode_message(message: Any, content_type: str = MSGPACK) -> bytes:
    """A message other than a batch, as msgpack or JSON."""
    return _ENCODE_MSGPACK(message) if content_type == MSGPACK else _ENCODE_JSON(message)


def encode_json(answer: Any) -> bytes:
    """An answer as JSON; its number fields are `Number` already (`to_number`, `undefined_to_none`)."""
    return _ENCODE_JSON(answer)


def decode_message(data: bytes, kind: type[_Message], content_type: str = MSGPACK) -> _Message:
    """The message of type `kind` behind msgpack or JSON.

    Raises:
        WireError: not decodable, or a field of a wrong type or beyond its bound; `field` names it.
    """
    try:
        if content_type == MSGPACK:
            return msgspec.msgpack.decode(data, type=kind)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wire_error(error) from error


def encode_batch(batch: ReportBatch, content_type: str = MSGPACK) -> bytes:
    """A batch of reports, as msgpack or JSON."""
    if content_type == MSGPACK:
        return _ENCODE_MSGPACK(batch)
    return _ENCODE_JSON(_JsonBatch(reports=[_to_json(report) for report in batch.reports], gaps=batch.gaps))


def decode_batch(data: bytes, content_type: str = MSGPACK) -> ReportBatch:
    """The batch behind msgpack or JSON.

    Raises:
        WireError: not decodable, or a field of a wrong type or beyond its bound; `field` names it.
    """
    try:
        if content_type == MSGPACK:
            return _DECODE_BATCH(data)
        batch = _DECODE_JSON_BATCH(data)
        return ReportBatch(reports=[_from_json(report) for report in batch.reports], gaps=batch.gaps)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wire_error(error) from error


def _to_json(report: Report) -> _JsonReport:
    shape = (report.statistic_count, report.layer_count)
    block = None if report.statistics is None else block_from_bytes(report.statistics, shape)
    model = None if report.model is None else block_from_bytes(report.model, shape[:1], "model")
    return _JsonReport(
        seq=report.seq,
        step=report.step,
        time=to_number(report.time),
        scalars={name: to_number(value) for name, value in report.scalars.items()},
        statistic_count=report.statistic_count,
        layer_count=report.layer_count,
        statistics=None if block is None else [[to_number(value) for value in row] for row in block.tolist()],
        model=None if model is None else [to_number(value) for value in model.tolist()],
    )


def _from_json(report: _JsonReport) -> Report:
    statistics = None
    if report.statistics is not None:
        if any(len(row) != len(report.statistics[0]) for row in report.statistics):
            raise WireError("statistics: rows of unequal length; send [statistic][layer]", field="statistics")
        statistics = block_to_bytes(np.array(report.statistics, dtype=np.float64))
    model = None if report.model is None else block_to_bytes(np.array(report.model, dtype=np.float64))
    return Report(
        seq=report.seq,
        step=report.step,
        time=from_number(report.time),
        scalars={name: from_number(value) for name, value in report.scalars.items()},
        statistic_count=report.statistic_count,
        layer_count=report.layer_count,
        statistics=statistics,
        model=model,
    )


def _wire_error(error: Exception) -> WireError:
    text = str(error)
    _, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    return WireError(text or type(error).__name__, field=field)
