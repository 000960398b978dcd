"""Encode and decode messages: msgpack for machines, JSON for people. Every failure is a WireError.

In JSON a report's totals are nested lists (`statistics` [statistic][layer], `model` [statistic]), and non-finite
numbers are strings.

The agent, the client and the server's `api/bodies.py` all encode by it. Both encodings are fixed
(`tests/server/test_bodies.py`).
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np

from collage_monitor.errors import WireError
from collage_monitor.wire.answers import RejectedReport
from collage_monitor.wire.messages import LIMITS, Index, Report, ReportBatch, ReportGap, ReportsOfStep
from collage_monitor.wire.number_encoding import Number, array_from_bytes, array_to_bytes, from_number, to_number

__all__ = [
    "JSON",
    "MSGPACK",
    "decode_batch",
    "decode_batch_singly",
    "decode_message",
    "encode_batch",
    "encode_json",
    "encode_message",
]

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
    reports_of_step: ReportsOfStep = msgspec.field(default=1, name="parts")


class _JsonBatch(msgspec.Struct, kw_only=True, frozen=True):
    reports: list[_JsonReport]
    gaps: list[ReportGap] = msgspec.field(default_factory=list)


_Bound = msgspec.Meta(max_length=LIMITS["reports_per_batch"])


class _RawBatch(msgspec.Struct, kw_only=True, frozen=True):
    reports: Annotated[list[msgspec.Raw], _Bound]
    gaps: Annotated[list[ReportGap], _Bound] = msgspec.field(default_factory=list)


class _PlainBatch(msgspec.Struct, kw_only=True, frozen=True):
    reports: Annotated[list[Any], _Bound]
    gaps: list[ReportGap] = msgspec.field(default_factory=list)


class _Numbered(msgspec.Struct, frozen=True):
    seq: Index


class _RawScalars(msgspec.Struct, frozen=True):
    scalars: msgspec.Raw


_LENGTH: Final = re.compile(r"length <= (\d+)")
_DECODE_JSON_BATCH = msgspec.json.Decoder(_JsonBatch).decode
_DECODE_REPORT = msgspec.msgpack.Decoder(Report).decode
_DECODE_RAW_BATCH = msgspec.msgpack.Decoder(_RawBatch).decode
_DECODE_PLAIN_BATCH = msgspec.json.Decoder(_PlainBatch).decode
_DECODE_NUMBERED = msgspec.msgpack.Decoder(_Numbered).decode
_DECODE_RAW_SCALARS = msgspec.msgpack.Decoder(_RawScalars).decode


def encode_message(message: Any, content_type: str = MSGPACK) -> bytes:
    """A message other than a batch, as msgpack or JSON."""
    return _ENCODE_MSGPACK(message) if content_type == MSGPACK else _ENCODE_JSON(message)


def encode_json(answer: Any) -> bytes:
    """An answer as JSON. Its number fields must be `Number`s already (`to_number`, `undefined_to_none`)."""
    return _ENCODE_JSON(answer)


def decode_message(data: bytes | bytearray, kind: type[_Message], content_type: str = MSGPACK) -> _Message:
    """Decode a message of type `kind` from msgpack or JSON.

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


def decode_batch(data: bytes | bytearray, content_type: str = MSGPACK) -> ReportBatch:
    """Decode a batch from msgpack or JSON.

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


def decode_batch_singly(
    data: bytes | bytearray, content_type: str = MSGPACK
) -> tuple[ReportBatch, list[RejectedReport]]:
    """Decode the reports of a batch one by one; say what is wrong with each that cannot be decoded.

    `index` is a refused report's place in the batch as it was sent. In msgpack, a report of too many scalars is
    refused before they are decoded: as objects they take 25 times as many bytes.

    Raises:
        WireError: the batch itself is not decodable, or none of its reports is.
    """
    try:
        parts = _parts(data, content_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wire_error(error) from error
    kept: list[Report] = []
    refused: list[RejectedReport] = []
    first: WireError | None = None
    readable = False
    for index, part in enumerate(parts.reports):
        try:
            _require_few_scalars(part)
            kept.append(_one_report(part))
        except WireError as error:
            code = "unreadable" if error.limit is None else "too_many"
            first, readable = first or error, readable or code == "too_many"
            refused.append(
                RejectedReport(
                    index=index,
                    seq=_number_of(part),
                    code=code,
                    message=str(error),
                    field=error.field or None,
                    limit=error.limit,
                )
            )
    if first is not None and not kept and not readable:
        raise first
    return ReportBatch(reports=kept, gaps=parts.gaps), refused


def _parts(data: bytes | bytearray, content_type: str) -> _RawBatch | _PlainBatch:
    """The reports one by one, in no more memory than decoding them together takes.

    Only msgpack gives the length of a list before its elements, and in JSON a `Raw` is larger than most elements.
    """
    if content_type == MSGPACK:
        return _DECODE_RAW_BATCH(data)
    return _DECODE_PLAIN_BATCH(data)


def _require_few_scalars(part: Any) -> None:
    """Raise WireError unless the report may hold so many scalars; a malformed one is left to its decoder."""
    count = 0
    if isinstance(part, msgspec.Raw):
        with suppress(msgspec.MsgspecError, RecursionError):
            count = _map_length(bytes(memoryview(_DECODE_RAW_SCALARS(part).scalars)[:5]))
    most = LIMITS["scalars_per_report"]
    if count > most:
        raise WireError(f"{count} scalars, at most {most}", field="scalars", limit=most)


def _map_length(head: bytes) -> int:
    """The number of entries of a msgpack map, from its first bytes; 0 if it is not a map."""
    if head[0] in (0xDE, 0xDF):
        return int.from_bytes(head[1 : 3 if head[0] == 0xDE else 5], "big")
    return head[0] & 0x0F if head[0] & 0xF0 == 0x80 else 0


def _one_report(part: Any) -> Report:
    try:
        if isinstance(part, msgspec.Raw):
            return _DECODE_REPORT(part)
        return _from_json(msgspec.convert(part, type=_JsonReport))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wire_error(error) from error


def _number_of(part: Any) -> int | None:
    try:
        if isinstance(part, msgspec.Raw):
            return _DECODE_NUMBERED(part).seq
        return msgspec.convert(part, type=_Numbered).seq
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _to_json(report: Report) -> _JsonReport:
    shape = (report.statistic_count, report.layer_count)
    block = None if report.statistics is None else array_from_bytes(report.statistics, shape)
    model = None if report.model is None else array_from_bytes(report.model, shape[:1], "model")
    return _JsonReport(
        seq=report.seq,
        step=report.step,
        time=to_number(report.time),
        scalars={name: to_number(value) for name, value in report.scalars.items()},
        statistic_count=report.statistic_count,
        layer_count=report.layer_count,
        statistics=None if block is None else [[to_number(value) for value in row] for row in block.tolist()],
        model=None if model is None else [to_number(value) for value in model.tolist()],
        reports_of_step=report.reports_of_step,
    )


def _from_json(report: _JsonReport) -> Report:
    statistics = None
    if report.statistics is not None:
        if any(len(row) != len(report.statistics[0]) for row in report.statistics):
            raise WireError("statistics: rows of unequal length; send [statistic][layer]", field="statistics")
        statistics = array_to_bytes(np.array(report.statistics, dtype=np.float64))
    model = None if report.model is None else array_to_bytes(np.array(report.model, dtype=np.float64))
    return Report(
        seq=report.seq,
        step=report.step,
        time=from_number(report.time),
        scalars={name: from_number(value) for name, value in report.scalars.items()},
        statistic_count=report.statistic_count,
        layer_count=report.layer_count,
        statistics=statistics,
        model=model,
        reports_of_step=report.reports_of_step,
    )


def _wire_error(error: Exception) -> WireError:
    text = str(error)
    _, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    bound = _LENGTH.search(text)
    return WireError(text or type(error).__name__, field=field, limit=None if bound is None else int(bound[1]))
