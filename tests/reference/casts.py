"""Low-precision copies of weights: every format as a table of all its numbers, searched for the nearest one.

Nothing here knows how the agent rounds. All that is compared is exact in fp64: the numbers of a format, the middle
between two of them, and a weight over a power of two. Scales follow docs/metrics.md, NVFP4's in fp32 operations.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np

ELEMENTS = {
    "bf16": (8, 7, None),
    "fp16": (5, 10, None),
    "fp8_e4m3": (4, 3, 448),
    "fp8_e5m2": (5, 2, 57344),
    "mxfp8": (4, 3, 448),
    "nvfp4": (2, 1, 6),
}
"""Exponent bits, mantissa bits, and where numbers saturate; None: they overflow to infinity."""
BLOCK = {"mxfp8": 32, "nvfp4": 16}


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
    kept: np.ndarray = grid if largest is None else grid[grid <= largest]
    return kept


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
    signed: np.ndarray = np.copysign(found, values)
    return signed


def copy_of(rows: np.ndarray, name: str) -> np.ndarray:
    """The copy of a matrix [rows, columns] in fp64; blocks lie along its last dimension."""
    numbers, scale = parts_of(rows, name)
    found: np.ndarray = (numbers * scale).reshape(rows.shape)
    return found


def parts_of(rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that the copy keeps, and what they are times: fp64 [blocks, block], [blocks, 1]."""
    if name not in BLOCK:
        return nearest(rows, name), np.ones(1)
    blocks = rows.reshape(-1, BLOCK[name])
    amax = np.abs(blocks).max(1, keepdims=True)
    return _mx(blocks, amax) if name == "mxfp8" else _nv(blocks, amax, amax.max())


def _mx(blocks: np.ndarray, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.full(amax.shape, 2.0**-127)
    while (amax / scale > 448).any():
        scale = np.where(amax / scale > 448, 2 * scale, scale)
    return nearest(blocks / scale, "mxfp8"), scale


def _nv(blocks: np.ndarray, amax: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    if largest == 0:
        return np.zeros(blocks.shape), np.ones(amax.shape)
    single = np.float32
    encode = single(2688) / single(largest)
    decode = single(1) / encode
    scale = nearest(amax.astype(single) / single(6) * encode, "fp8_e4m3")
    with np.errstate(divide="ignore"):
        inverse = np.minimum(single(1) / (scale.astype(single) * decode), np.finfo(single).max)
    return nearest(blocks.astype(single) * inverse, "nvfp4"), scale * float(decode)


def sums(before: np.ndarray, after: np.ndarray, intended: list[Fraction], name: str) -> dict[str, float]:
    """Totals of a tensor [rows, columns] before and after; intended: u, flat."""
    changes = (copy_of(after, name) - copy_of(before, name)).reshape(-1).tolist()
    return {
        "elements": len(changes),
        "changed": sum(change != 0 for change in changes),
        "recoded": int((parts_of(after, name)[0] != parts_of(before, name)[0]).sum()),
        "squared_sum": float(sum(u * u for u in intended)),
        "effective_sum": float(sum(u * Fraction(change) for u, change in zip(intended, changes, strict=True))),
    }
