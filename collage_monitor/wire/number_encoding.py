"""Numbers on the wire: arrays of little-endian float64, and non-finite values in JSON.

JSON has no NaN: a non-finite number is the string "NaN", "Infinity" or "-Infinity", and *undefined* is null.
Msgpack carries float64 as it is.

Fixed on both sides, and in stored spools.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from collage_monitor.errors import WireError

__all__ = [
    "Number",
    "array_from_bytes",
    "array_to_bytes",
    "defined",
    "from_number",
    "to_number",
    "undefined_to_none",
]

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A JSON number, or the string that stands for a non-finite one."""
_LITTLE = np.dtype("<f8")


def to_number(value: float) -> Number:
    """A float as JSON can carry it."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def defined(value: float) -> Number | None:
    """A metric's value as JSON can carry it: NaN means undefined, so null."""
    return None if math.isnan(value) else to_number(value)


def from_number(value: Number) -> float:
    """The float behind a JSON number or its string."""
    return float(value)


def undefined_to_none(values: NDArray[np.float64] | NDArray[np.int64]) -> list[Number | None]:
    """A one-dimensional array of metrics for JSON: NaN means undefined, so null; infinities become strings."""
    numbers: list[Number | None] = values.tolist()
    finite = np.isfinite(values)
    for index in () if finite.all() else np.flatnonzero(~finite).tolist():
        numbers[index] = None if math.isnan(values[index]) else to_number(float(values[index]))
    return numbers


def array_to_bytes(block: NDArray[np.float64]) -> bytes:
    """A float64 array of any shape as little-endian bytes in C order."""
    return np.ascontiguousarray(block, dtype=_LITTLE).tobytes()


def array_from_bytes(data: bytes, shape: tuple[int, ...], field: str = "statistics") -> NDArray[np.float64]:
    """The float64 array [*shape] behind little-endian bytes; read-only, shares memory on little-endian machines.

    Raises:
        WireError: the number of bytes does not fit the shape.
    """
    expected = 8 * math.prod(shape)
    if len(data) != expected:
        raise WireError(
            f"{field}: {len(data)} bytes, but {'×'.join(map(str, shape))} float64 take {expected}", field=field
        )
    return np.frombuffer(data, dtype=_LITTLE).reshape(shape).astype(np.float64, copy=False)
