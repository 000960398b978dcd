"""Ranges of numbers: as a set, for any numbers in any order."""

from __future__ import annotations

import itertools

import pytest
from collage_server.store.row_helpers import add_numbers, contains, ranges_from_json, ranges_to_json
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

numbers = st.lists(st.integers(min_value=0, max_value=60))


@given(st.lists(numbers))
def test_ranges_are_the_set_of_their_numbers(batches):
    ranges: list[tuple[int, int]] = []
    expected: set[int] = set()
    for batch in batches:
        ranges = add_numbers(ranges, batch)
        expected |= set(batch)
    assert {number for number in range(-1, 63) if contains(ranges, number)} == expected
    assert all(first <= last for first, last in ranges)
    gaps = itertools.pairwise(ranges)
    assert all(before[1] + 1 < after[0] for before, after in gaps)
    assert ranges_from_json(ranges_to_json(ranges)) == ranges
