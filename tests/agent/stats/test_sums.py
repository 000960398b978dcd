"""Sums over blocks and tensors, and their variances, against numpy and exact fractions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from collage_agent.stats.block_sums import Segments
from collage_agent.stats.edq import edq_block_sums, edq_products, squared_block_sums
from collage_agent.stats.intervals import (
    fourth_moments,
    interval_keys,
    missed_share,
    population_factor,
    product_rows,
    ratio_variances,
    tail_share,
)

from collage_monitor.definitions import Interval
from tests.reference import diagnostics


def test_block_sums_equal_the_exact_ones():
    rows = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact: Any = [diagnostics.exact(row) for row in rows]
    squares = squared_block_sums(rows, 32)
    products = edq_block_sums(edq_products(rows[0], rows[1:]), 32)
    for block in range(2):
        part = slice(32 * block, 32 * block + 32)
        for row in range(3):
            expected = diagnostics.total(x * x for x in exact[row][part])
            assert float(squares[row, block]) == pytest.approx(float(expected), rel=1e-15 * 8)
        for row in (1, 2):
            expected = diagnostics.total(x * y for x, y in zip(exact[0][part], exact[row][part], strict=True))
            assert float(products[row - 1, block]) == pytest.approx(float(expected), rel=1e-12)


def test_columns_add_up_blocks_of_the_same_tensor():
    values = torch.arange(12, dtype=torch.float64).view(2, 6)
    segments = Segments(torch.tensor([0, 2, 2, 0, 1, 2]), 4)
    assert segments.sums(values).tolist() == [[3.0, 4.0, 8.0, 0.0], [15.0, 10.0, 26.0, 0.0]]


def test_variances_equal_the_textbook_formula():
    generator = np.random.default_rng(5)
    sizes, populations = (7, 12, 5), (70, 12, 30)
    of_block = torch.tensor([tensor for tensor, size in enumerate(sizes) for _ in range(size)])
    a, b = (torch.from_numpy(generator.normal(3.0, 1.0, len(of_block))) for _ in range(2))
    segments = Segments(of_block, 3)
    numerators, denominators = a.view(1, -1), b.view(1, -1)
    found = ratio_variances(
        segments.sums(product_rows(numerators, denominators)),
        segments.sums(numerators),
        segments.sums(denominators),
        torch.tensor(sizes, dtype=torch.float64),
        population_factor(torch.tensor(sizes, dtype=torch.float64), torch.tensor(populations, dtype=torch.float64)),
    )
    for tensor in (0, 2):
        mine = of_block == tensor
        expected = diagnostics.variances(a[mine].tolist(), b[mine].tolist(), populations[tensor])
        assert found[:, tensor].tolist() == pytest.approx(expected, rel=1e-10)
    assert found[:, 1].tolist() == [0.0, 0.0, 0.0]
    variances = ("variance_numerator/x", "variance_denominator/x", "covariance/x")
    assert interval_keys({"x": Interval("a", "b")}) == (*variances, "fourth_moment/x")
    assert interval_keys({"x": Interval("a", "b", share=True)}) == variances


def test_fourth_moments_tell_from_how_many_blocks_a_variance_comes():
    generator = np.random.default_rng(6)
    a, b = (torch.from_numpy(generator.normal(3.0, 1.0, 40)) for _ in range(2))
    segments, factor = Segments(torch.zeros(40, dtype=torch.int64), 1), torch.tensor([2.5], dtype=torch.float64)
    ratio = (a.sum() / b.sum()).view(1, 1)
    found = fourth_moments(a.view(1, -1), b.view(1, -1), ratio, segments, factor)
    exact = [diagnostics.exact(values) for values in (a, b, ratio[0])]
    expected = sum((x - exact[2][0] * y) ** 4 for x, y in zip(*exact[:2], strict=True))
    assert float(found[0, 0]) == pytest.approx(2.5**2 * float(expected), rel=1e-12)


COUNT = torch.full((1,), 50.0, dtype=torch.float64)
SQUARES, OTHERS = (torch.from_numpy(row) for row in np.random.default_rng(7).chisquare(32, (2, 50)))
ERROR = float((SQUARES.var() * 49 * population_factor(COUNT, 10 * COUNT)).sqrt())
TOTAL, LARGEST = 10 * float(SQUARES.sum()), float(SQUARES.max())


@pytest.mark.parametrize(
    ("other", "whole", "largest", "expected"),
    [
        (SQUARES, TOTAL + 3 * ERROR, 0.0, 9.0),
        (4 * SQUARES, 4 * (TOTAL - 3 * ERROR), 0.0, 9.0),
        (OTHERS, 1e4, 0.0, 0.0),
        (SQUARES, torch.nan, 0.0, 0.0),
        (torch.zeros_like(SQUARES), 1.0, 0.0, torch.inf),
        # One element larger than any sampled block may bring four tenths of a standard error.
        (SQUARES, TOTAL, LARGEST, 0.0),
        (SQUARES, TOTAL, 0.4 * ERROR, 2.25**2),
        (SQUARES, TOTAL, ERROR, (2.25 / 0.4) ** 2),
    ],
)
def test_what_a_sample_misses_is_told_by_an_auxiliary_that_steps_grow_with(other, whole, largest, expected):
    segments, told = (
        Segments(torch.zeros(50, dtype=torch.int64), 1),
        torch.tensor([[whole], [largest]], dtype=torch.float64),
    )
    scale, factor = torch.full_like(COUNT, 10.0), population_factor(COUNT, 10 * COUNT)
    found = missed_share(SQUARES, other, told, segments, scale, COUNT, factor)
    # Norms may be rounded to 16 bits: so much of the whole is not counted as missed.
    rounding = whole / float(other.sum() or 1) * float(SQUARES.sum()) * 2.0**-7 / ERROR
    wanted = (expected**0.5 - rounding) ** 2 if expected == 9.0 else expected
    assert LARGEST < 0.4 * ERROR
    assert float(found) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("deviations", "outlies"), [(1.0, False), (9.99, False), (10.01, True), (1e3, True)])
def test_a_block_far_above_the_others_may_be_missed_at_another_step(deviations, outlies):
    others = np.random.default_rng(8).chisquare(32, (2, 49))
    largest = others.mean(1) + np.array([deviations, 1.0]) * others.std(1, ddof=1)
    squares = torch.from_numpy(np.concatenate((others, largest[:, None]), 1))
    segments = Segments(torch.arange(2).repeat_interleave(50), 2)
    count = torch.full((2,), 50.0, dtype=torch.float64)
    factor = population_factor(count, 10 * count)
    variance = ((others[0] - others[0].mean()) ** 2).sum() * float(factor[0])
    expected = (2.25 / 0.4 * largest[0]) ** 2 / variance if outlies else 0.0
    found = tail_share(squares.flatten(), segments, count, factor)
    assert found.tolist() == pytest.approx([expected, 0.0], rel=1e-6)


def test_one_block_of_many_has_no_variance_and_a_whole_tensor_of_one_block_has_none_to_speak_of():
    one = torch.ones(3, 3, dtype=torch.float64)
    factor = population_factor(one[0], torch.tensor([9.0, 2.0, 1.0], dtype=torch.float64))
    assert factor.tolist() == pytest.approx([math.nan, math.nan, 0.0], rel=0, abs=0, nan_ok=True)
    found = ratio_variances(one, one[:1], one[:1], one[0], factor)
    assert found[:, :2].isnan().all()
    assert found[:, 2].tolist() == [0.0, 0.0, 0.0]
