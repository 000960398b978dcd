"""OTLP's messages of metrics: what is read of them, in protobuf and in JSON, and the answer to them.

Only fields that are used are described. The protocol has a library, but that brings protobuf, whose version a
training often fixes otherwise. `api/otlp.py` makes reports of them; `tests/server/test_otlp.py` has messages of the
real exporter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from collage_monitor import wire
from collage_server.errors import BadRequest

__all__ = ["PROTOBUF", "Attribute", "DataPoint", "Export", "export_in", "response"]

PROTOBUF: Final = "application/x-protobuf"
_MOST_PARTS: Final = 60_000
"""Data points and attributes of one message, which take more memory than their bytes: 20 MB."""
_TOO_MANY: Final = f"it has more than {_MOST_PARTS} data points and attributes, send smaller batches"


_Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""JSON and Python would take larger ones, which are no floating-point number and take long to print."""


class _Value(msgspec.Struct, rename="camel"):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: _Signed | None = None
    double_value: float | None = None


class Attribute(msgspec.Struct):
    key: str = ""
    value: _Value = msgspec.field(default_factory=_Value)


class DataPoint(msgspec.Struct, rename="camel"):
    """A number, or the count and sum of a histogram or summary."""

    attributes: list[Attribute] = []
    time_unix_nano: _Unsigned = 0
    as_double: float | None = None
    as_int: _Signed | None = None
    count: _Unsigned | None = None
    sum: float | None = None
    flags: _Unsigned = 0


class _DataPoints(msgspec.Struct, rename="camel"):
    data_points: list[DataPoint] = []


class _Metric(msgspec.Struct, rename="camel"):
    name: str = ""
    gauge: _DataPoints | None = None
    sum: _DataPoints | None = None
    histogram: _DataPoints | None = None
    exponential_histogram: _DataPoints | None = None
    summary: _DataPoints | None = None

    def points(self) -> Iterator[DataPoint]:
        """Those of whichever kind it is."""
        for kind in (self.gauge, self.sum, self.histogram, self.exponential_histogram, self.summary):
            yield from () if kind is None else kind.data_points


class _Scope(msgspec.Struct):
    metrics: list[_Metric] = []


class _Resource(msgspec.Struct):
    attributes: list[Attribute] = []


class _ResourceMetrics(msgspec.Struct, rename="camel"):
    resource: _Resource = msgspec.field(default_factory=_Resource)
    scope_metrics: list[_Scope] = []


class Export(msgspec.Struct, rename="camel"):
    resource_metrics: list[_ResourceMetrics] = []


_DECODE_JSON: Final = msgspec.json.Decoder(Export, strict=False).decode


class _Field(NamedTuple):
    """A field on the wire: its name in JSON, and `struct`'s format, a message's fields, or "varint" or "text"."""

    name: str
    kind: str | Mapping[int, _Field]
    is_list: bool = False


_VARINT, _LENGTH = 0, 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_ATTRIBUTE: Final = {
    1: _Field("key", "text"),
    2: _Field(
        "value",
        {
            1: _Field("stringValue", "text"),
            2: _Field("boolValue", "varint"),
            3: _Field("intValue", "varint"),
            4: _Field("doubleValue", "<d"),
        },
    ),
}
_TIME: Final = {3: _Field("timeUnixNano", "<Q")}
_TOTALS: Final = {**_TIME, 4: _Field("count", "<Q"), 5: _Field("sum", "<d")}


def _points_of(attributes: int, flags: int, fields: Mapping[int, _Field]) -> dict[int, _Field]:
    more = {attributes: _Field("attributes", _ATTRIBUTE, True), flags: _Field("flags", "varint")}
    return {1: _Field("dataPoints", {**fields, **more}, True)}


_NUMBER: Final = {**_TIME, 4: _Field("asDouble", "<d"), 6: _Field("asInt", "<q")}
_NUMBERS: Final = _points_of(7, 8, _NUMBER)
_METRIC: Final = {
    1: _Field("name", "text"),
    5: _Field("gauge", _NUMBERS),
    7: _Field("sum", _NUMBERS),
    9: _Field("histogram", _points_of(9, 10, _TOTALS)),
    10: _Field("exponentialHistogram", _points_of(1, 10, _TOTALS)),
    11: _Field("summary", _points_of(7, 8, _TOTALS)),
}
_MESSAGE: Final = {
    1: _Field(
        "resourceMetrics",
        {
            1: _Field("resource", {1: _Field("attributes", _ATTRIBUTE, True)}),
            2: _Field("scopeMetrics", {2: _Field("metrics", _METRIC, True)}, True),
        },
        True,
    )
}


def _read(data: memoryview, fields: Mapping[int, _Field], parts: Iterator[int]) -> dict[str, Any]:
    """A message of protobuf as its JSON would be decoded; fields that are not described are passed over.

    parts: one is taken for each entry of a list.

    Raises:
        ValueError: it is none.
    """
    found: dict[str, Any] = {}
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        value: int | memoryview
        if kind == _VARINT:
            value, place = _varint(data, place)
        else:
            size, place = _varint(data, place) if kind == _LENGTH else (_FIXED_BYTES.get(kind, -1), place)
            if not 0 <= size <= len(data) - place:
                raise ValueError(
                    f"field {number} has wire type {kind} and {size} bytes, {len(data) - place} are left"
                )
            value, place = data[place : place + size], place + size
        field = fields.get(number)
        if field is None:
            continue
        decoded = _decoded(field, value, kind, parts)
        if not field.is_list:
            found[field.name] = decoded
        elif next(parts, None) is None:
            raise ValueError(_TOO_MANY)
        else:
            found.setdefault(field.name, []).append(decoded)
    return found


def _decoded(field: _Field, value: int | memoryview, kind: int, parts: Iterator[int]) -> Any:
    if isinstance(value, int):
        if field.kind == "varint":
            signed = value - 2**64 if value >= 2**63 else value
            return bool(signed) if field.name == "boolValue" else signed
    elif kind == _LENGTH and not isinstance(field.kind, str):
        return _read(value, field.kind, parts)
    elif kind == _LENGTH and field.kind == "text":
        return str(value, "utf-8")
    elif isinstance(field.kind, str) and field.kind.startswith("<") and len(value) == struct.calcsize(field.kind):
        return struct.unpack(field.kind, value)[0]
    raise ValueError(f"{field.name} has wire type {kind}")


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """The number there, and the place behind it."""
    if place < len(data) and data[place] < 0x80:
        return data[place], place + 1
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 2**64 - 1, place
    raise ValueError("a number is cut off or too long")


def export_in(body: bytes | bytearray, content_type: str) -> Export:
    """The message in a body.

    Raises:
        BadRequest: there is none.
    """
    try:
        if content_type == wire.JSON:
            if body.count(b"{") > _MOST_PARTS:
                raise ValueError(_TOO_MANY)
            return _DECODE_JSON(body)
        return msgspec.convert(_read(memoryview(body), _MESSAGE, iter(range(_MOST_PARTS))), Export)
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            f"the body is no ExportMetricsServiceRequest of OTLP in {content_type}: {error}", field="body"
        ) from error


def response(rejected: int, why: str, content_type: str) -> bytes:
    """ExportMetricsServiceResponse: empty, or how many data points were rejected and why, its partial_success."""
    if content_type == wire.JSON:
        partial = {"partialSuccess": {"rejectedDataPoints": str(rejected), "errorMessage": why}}
        return wire.encode_json(partial if rejected else {})
    message = why.encode()
    partial_bytes = b"\x08" + _as_varint(rejected) + b"\x12" + _as_varint(len(message)) + message
    return b"\x0a" + _as_varint(len(partial_bytes)) + partial_bytes if rejected else b""


def _as_varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
