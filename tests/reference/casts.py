"""Low-precision copies of weights: every format as a table of all its numbers, searched for the nearest one.

Nothing here knows how the agent rounds. All that is compared is exact in fp64: the numbers of a format, the middle
between two of them, and a weight over a power of two. Scales follow docs/reference/copies-and-averages.md, tile by
tile, those of NVFP4 and fp32 ones in fp32 operations.
"""

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

WHOLE_ROW = 2**62
_TABLE = {
    "bf16": ((8, 7, None), (), (2, 0)),
    "fp16": ((5, 10, None), (), (2, 0)),
    "fp8_e4m3": ((4, 3, 448), (), (1, 0)),
    "fp8_e5m2": ((5, 2, 57344), (), (1, 0)),
    "fp8_tensor": ((4, 3, 448), None, (1, 0)),
    "fp8_block128": ((4, 3, 448), (128, 128), (1, 4)),
    "fp8_block128_ue8m0": ((4, 3, 448), (128, 128), (1, 1)),
    "mxfp8": ((4, 3, 448), (1, 32), (1, 1)),
    "nvfp4": ((2, 1, 6), (1, 16), (0.5, 1)),
    "nvfp4_2d": ((2, 1, 6), (16, 16), (0.5, 1)),
    "int8_tensor": ((-128, 127), None, (1, 0)),
    "int8_channel": ((-128, 127), (1, WHOLE_ROW), (1, 0)),
    "int4_channel": ((-8, 7), (1, WHOLE_ROW), (0.5, 0)),
    "int4_group32": ((-8, 7), (1, 32), (0.5, 4)),
    "int4_group128": ((-8, 7), (1, 128), (0.5, 4)),
    "uint4_group32": ((0, 15), (1, 32), (0.5, 5)),
}
FORMATS = tuple(_TABLE)
ELEMENTS: dict[str, Any] = {name: numbers for name, (numbers, _, _) in _TABLE.items() if len(numbers) == 3}
"""Exponent bits, mantissa bits, and where numbers saturate; None: they overflow to infinity."""
INTEGERS: dict[str, Any] = {name: numbers for name, (numbers, _, _) in _TABLE.items() if len(numbers) == 2}
"""The first and the last code; from 0 on, codes have a zero point."""
TILE: dict[str, Any] = {name: tile for name, (_, tile, _) in _TABLE.items() if tile != ()}
"""Rows and columns that share a scale in formats that have some; None: all of the tensor."""
BYTES = {name: sizes for name, (_, _, sizes) in _TABLE.items()}
"""Of a code, and of a tile's scale with its zero point; those of a channel and a whole tensor do not count."""


@cache
def numbers(name: str) -> np.ndarray:
    """All numbers ≥ 0 in ascending order, which is that of their bit patterns; one that overflows stands last."""
    exponent_bits, mantissa_bits, largest = ELEMENTS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    # Where there are infinities, the last exponent is theirs; the first is where the next number would be.
    count = 2 ** (exponent_bits + mantissa_bits) - (2**mantissa_bits - 1 if largest is None else 0)
    found = []
    for pattern in range(count):
        field, mantissa = divmod(pattern, 2**mantissa_bits)
        value = Fraction(mantissa, 2**mantissa_bits) + (1 if field else 0)
        found.append(float(value * Fraction(2) ** (max(field, 1) - bias)))
    grid = np.array(found)
    return grid if largest is None else np.asarray(grid[grid <= largest])


def nearest(values: np.ndarray, name: str) -> np.ndarray:
    """The nearest numbers of the format's elements, ties to the even pattern; fp64, infinite where it overflows."""
    grid = numbers(name)
    magnitude = np.minimum(np.abs(np.asarray(values, dtype=np.float64)), grid[-1])
    above = np.searchsorted(grid, magnitude)
    below = np.maximum(above - 1, 0)
    middle = (grid[below] + grid[above]) / 2
    chosen = np.where((magnitude < middle) | ((magnitude == middle) & (below % 2 == 0)), below, above)
    chosen = np.where(magnitude == grid[above], above, chosen)
    found = grid[chosen]
    if ELEMENTS[name][2] is None:
        found = np.where(chosen == len(grid) - 1, np.inf, found)
    return np.asarray(np.copysign(found, values))


def copy_of(rows: np.ndarray, name: str, largest: float | None = None) -> np.ndarray:
    """The copy of a matrix [rows, columns] in fp64, by the route that `name` is; `largest`: of the whole tensor."""
    numbers, scales, of_tensor = parts_of(rows, name, largest)
    if name.endswith("uint4_group32"):
        for route in name.split(">")[:-1]:
            rows = nearest(rows, route)
        zero_points = [_zero_point(group) for group in rows.reshape(-1, 32)]
        numbers = numbers - np.repeat(zero_points, 32).reshape(rows.shape)
    return np.asarray(numbers * (scales * of_tensor))


def parts_of(rows: np.ndarray, name: str, largest: float | None = None) -> tuple[np.ndarray, np.ndarray, float]:
    """The numbers that the copy keeps, the scale that each is times, both [rows, columns], and the tensor's."""
    *before, last = name.split(">")
    for step in before:
        rows = nearest(rows, step)
        largest = largest if largest is None else float(nearest(np.array(largest), step))
    if last not in TILE:
        return nearest(rows, last), np.ones(rows.shape), 1.0
    numbers, scales = np.empty(rows.shape), np.empty(rows.shape)
    high, wide = TILE[last] or rows.shape
    largest, of_tensor = np.abs(rows).max() if largest is None else largest, 1.0
    for row in range(0, rows.shape[0], high):
        for column in range(0, rows.shape[1], wide):
            tile = slice(row, row + high), slice(column, column + wide)
            whole = largest if TILE[last] is None else np.abs(rows[tile]).max()
            if last.startswith("nvfp4"):
                numbers[tile], scales[tile], of_tensor = _nv(rows[tile], largest)
            elif last in ("fp8_tensor", "fp8_block128"):
                numbers[tile], scales[tile] = _single(rows[tile], whole)
            elif last in INTEGERS:
                numbers[tile], scales[tile] = _integers(rows[tile], whole, *INTEGERS[last])
            else:
                numbers[tile], scales[tile] = _mx(rows[tile])
    return numbers, scales, of_tensor


def _single(tile: np.ndarray, largest: float) -> tuple[np.ndarray, float]:
    single = np.float32
    scale = max(single(largest) / single(448), np.finfo(single).tiny)
    return nearest(tile.astype(single) / scale, "fp8_e4m3"), float(scale)


def _integers(tile: np.ndarray, largest: float, low: int, high: int) -> tuple[np.ndarray, float]:
    single, zero_point = np.float32, 0.0
    scale = max(single(largest) / single((high - low) / 2), np.finfo(single).tiny)
    if low == 0:
        scale, zero_point = _scale_to_zero(tile), _zero_point(tile)
    return np.clip(np.rint(tile.astype(single) * (single(1) / scale)) + zero_point, low, high), float(scale)


def _scale_to_zero(group: np.ndarray) -> np.float32:
    """The scale of a group in unsigned codes of 4 bits, whose range includes 0."""
    low, high = np.float32(min(group.min(), 0)), np.float32(max(group.max(), 0))
    return np.float32(max((high - low) / np.float32(15), np.finfo(np.float32).tiny))


def _zero_point(group: np.ndarray) -> float:
    return float(np.clip(-np.rint(np.float32(min(group.min(), 0)) / _scale_to_zero(group)), 0, 15))


def _mx(tile: np.ndarray) -> tuple[np.ndarray, float]:
    scale, largest = 2.0**-127, float(np.abs(tile).max())
    while largest / scale > 448:
        scale *= 2
    return nearest(tile.astype(np.float64) / scale, "mxfp8"), scale


def _nv(tile: np.ndarray, largest: float) -> tuple[np.ndarray, float, float]:
    if largest == 0:
        return np.zeros(tile.shape), 0.0, 1.0
    single = np.float32
    encode = single(2688) / single(largest)
    decode = single(1) / encode
    scale = nearest(np.asarray(single(np.abs(tile).max()) / single(6) * encode), "fp8_e4m3")
    with np.errstate(divide="ignore"):
        inverse = np.minimum(single(1) / (scale.astype(single) * decode), np.finfo(single).max)
    return nearest(tile.astype(single) * inverse, "nvfp4"), float(scale), float(decode)


def sync_bytes(before: np.ndarray, after: np.ndarray, name: str) -> tuple[float, float]:
    """Bytes of what changed, each with its place, and of the whole copy, counted tile by tile."""
    last = name.rpartition(">")[2]
    (now, scales_now, _), (then, scales_then, _) = parts_of(after, name), parts_of(before, name)
    code, scale = BYTES[last]
    changed = int((now != then).sum())
    sent, dense = changed * code + min(4 * changed, now.size / 8), now.size * code
    if scale:
        high, wide = TILE[last] or now.shape
        first = np.s_[::high, ::wide]
        sent += int((scales_now[first] != scales_then[first]).sum()) * (scale + 4)
        dense += scales_now[first].size * scale
    return float(sent), float(dense)


def sums(before: np.ndarray, after: np.ndarray, intended: list[Fraction], name: str) -> dict[str, float]:
    """Totals of a tensor [rows, columns] before and after; intended: u, flat."""
    changes = (copy_of(after, name) - copy_of(before, name)).reshape(-1).tolist()
    (now, scales_now, _), (then, scales_then, _) = parts_of(after, name), parts_of(before, name)
    return {
        "elements": len(changes),
        "changed": sum(change != 0 for change in changes),
        "recoded": int((now != then).sum()),
        "rescaled": int((scales_now != scales_then).sum()),
        "squared_sum": float(sum(u * u for u in intended)),
        "effective_sum": float(sum(u * Fraction(change) for u, change in zip(intended, changes, strict=True))),
    }
