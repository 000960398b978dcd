"""Sets of report numbers as few sorted ranges: which reports have left the journal for chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["Ranges", "add_numbers", "add_ranges", "contains", "count_numbers", "ranges_from_json", "ranges_to_json"]

Ranges = Sequence[tuple[int, int]]
"""Sorted, disjoint, not adjacent: (first, last), both inclusive."""

_DECODE = msgspec.json.Decoder(list[tuple[int, int]]).decode


def ranges_from_json(text: str) -> list[tuple[int, int]]:
    """The ranges behind their text."""
    return _DECODE(text)


def ranges_to_json(ranges: Ranges) -> str:
    """Ranges as text, [[first, last], …]."""
    return msgspec.json.encode(ranges).decode()


def contains(ranges: Ranges, number: int) -> bool:
    """Whether one of the ranges holds the number."""
    if not ranges or number > ranges[-1][1]:
        return False
    index = bisect_left(ranges, (number + 1,)) - 1
    return index >= 0 and number <= ranges[index][1]


def add_numbers(ranges: Ranges, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The ranges with these numbers added."""
    return add_ranges(ranges, ((number, number) for number in numbers))


def add_ranges(ranges: Ranges, added: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges with others added, which may overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*ranges, *added]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def count_numbers(ranges: Ranges) -> int:
    """How many numbers the ranges hold."""
    return sum(last - first + 1 for first, last in ranges)
