"""Correlations against their definitions, with ties, within strata, and undefined where nothing varies."""

from typing import Any

import numpy as np
import pytest
from collage_studies import results
from collage_studies.results import Point

correlation: Any = results.correlation


def points_of(xs, ys, stratum=None):
    return [Point(float(x), float(y), stratum) for x, y in zip(xs, ys, strict=True)]


def test_linear_correlation_is_numpys():
    generator = np.random.default_rng(3)
    x = generator.normal(size=40)
    y = 0.5 * x + generator.normal(size=40)
    found = correlation(points_of(x, y), ranks=False, within=False)
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
    # Fisher's interval of the same numbers, which a bootstrap of 40 points comes near.
    z, half = np.arctanh(found.value), 1.96 / np.sqrt(37)
    assert (found.low, found.high) == pytest.approx((np.tanh(z - half), np.tanh(z + half)), abs=0.08)


@pytest.mark.parametrize(
    ("xs", "ys", "ranked"),
    [([1, 2, 3, 4], [1, 10, 100, 1e6], [1, 2, 3, 4]), ([5, 5, 6, 7], [1, 2, 3, 4], [1.5, 1.5, 3, 4])],
)
def test_ranks_do_not_care_for_sizes_and_ties_share_theirs(xs, ys, ranked):
    found = correlation(points_of(xs, ys), ranks=True, within=False)
    assert found.value == pytest.approx(np.corrcoef(ranked, [1, 2, 3, 4])[0, 1])


@pytest.mark.parametrize("ranks", [True, False])
def test_within_strata_the_confounder_is_gone(ranks):
    """In each stratum the order is the reverse of that between them."""
    points = [
        *points_of([1, 2, 3], [3, 2, 1], "small"),
        *points_of([11, 12, 13], [13, 12, 11], "middle"),
        *points_of([21, 22, 23], [23, 22, 21], "large"),
    ]
    assert correlation(points, ranks=ranks, within=False).value > 0.75
    assert correlation(points, ranks=ranks, within=True).value == pytest.approx(-1)


def test_a_stratum_of_two_is_left_out():
    points = [*points_of([1, 2, 3], [1, 2, 3], "three"), *points_of([1, 2], [2, 1], "two")]
    found = correlation(points, ranks=True, within=True)
    assert found.value == pytest.approx(1)
    assert found.count == 3
    assert correlation(points[3:], ranks=True, within=True) is None


def test_what_does_not_vary_has_no_correlation():
    for points in (points_of([0.1] * 5, range(5)), points_of(range(5), [0.3] * 5)):
        for ranks in (False, True):
            assert correlation(points, ranks=ranks, within=False) is None


def test_one_point_that_decides_gives_no_interval():
    found = correlation(points_of([0, 0, 0, 1], [0, 0, 0, 1]), ranks=False, within=False)
    assert found.value == pytest.approx(1)
    assert found.low is found.high is None
