"""Merging: associative, commutative over shards, exact on counts; NaN is "not reported"; root_sum is careful."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collage_monitor.metrics import METRICS, STATISTICS, split_key, statistic
from collage_monitor.statistics import (
    finish_all,
    merge,
    merge_shards,
    merge_starts,
    merge_steps,
    reduce_shards,
    reduce_steps,
)
from tests.contract.labels import key_of

KEYS = [key_of(entry) for name, entry in STATISTICS.items() if name != "variance_product_root"]
numbers = st.one_of(st.just(float("nan")), st.integers(0, 2**20).map(float))
pairs = st.lists(numbers, min_size=2, max_size=2).map(np.array)
VARIANCES = ("variance_numerator/edq_ratio", "variance_denominator/edq_ratio", "covariance/edq_ratio")


@st.composite
def parts(draw):
    """Totals of one step: any keys, but the variances of a metric come together, as a worker sends them."""
    part = draw(st.dictionaries(st.sampled_from([key for key in KEYS if key not in VARIANCES]), pairs, min_size=1))
    if draw(st.booleans()):
        reported = np.where(draw(pairs) > 2**19, np.nan, 1.0)
        part |= {key: np.nan_to_num(draw(pairs)) * reported for key in VARIANCES}
    return part


def assert_same(left, right):
    assert set(left) == set(right)
    for key, values in left.items():
        np.testing.assert_allclose(values, right[key], rtol=1e-12, err_msg=key)


@pytest.mark.slow
@given(parts(), parts(), parts())
def test_merging_is_associative_and_commutative_but_for_the_last_value_of_steps(a, b, c):
    assert_same(merge_shards([merge_shards([a, b]), c]), merge_shards([a, merge_shards([b, c])]))
    assert_same(merge_shards([a, b]), merge_shards([b, a]))
    whole, left, right = merge_steps([a, b, c]), merge_steps([a, b]), merge_steps([b, a])
    assert_same(merge_steps([left, c]), whole)
    assert_same(merge_steps([a, merge_steps([b, c])]), whole)
    ordered = {key for key in left if statistic(key).over_steps == "last"}
    assert_same(*({k: v for k, v in side.items() if k not in ordered} for side in (left, right)))


@pytest.mark.slow
@given(st.lists(parts(), min_size=1, max_size=6), st.data())
def test_buckets_are_the_merges_of_their_steps(steps, data):
    cuts = data.draw(st.sets(st.integers(1, len(steps)), max_size=3))
    starts = np.array(sorted({0, *cuts} - {len(steps)}), dtype=np.intp)
    keys = {key for step in steps for key in step}
    missing = np.full(2, np.nan)
    stacked = {key: np.stack([step.get(key, missing) for step in steps]) for key in keys}
    reduced = reduce_steps(stacked, starts=starts)
    for index, (start, stop) in enumerate(zip(starts, [*starts[1:], len(steps)], strict=True)):
        complete = [{key: values[row] for key, values in stacked.items()} for row in range(start, stop)]
        assert_same({key: values[index] for key, values in reduced.items()}, merge_steps(complete))


def test_an_axis_in_the_middle():
    values = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(reduce_shards({"lost": values}, axis=1)["lost"], values.sum(axis=1))
    np.testing.assert_array_equal(
        reduce_steps({"lost": values}, axis=2, starts=np.array([0, 3]))["lost"],
        np.stack([values[..., :3].sum(axis=-1), values[..., 3]], axis=-1),
    )


def test_rules_by_hand():
    first = {"measured_steps": [1.0], "lost": [2.0**53 - 1], "active_blocks": [3.0], "parameter_squared_sum": [5.0]}
    second = {"measured_steps": [1.0], "lost": [1.0], "active_blocks": [4.0], "parameter_squared_sum": [np.nan]}
    a, b = ({key: np.array(values) for key, values in part.items()} for part in (first, second))
    shards, steps = merge([a, b], over="shards"), merge([a, b], over="steps")
    assert [shards["measured_steps"], steps["measured_steps"]] == [1.0, 2.0]
    assert shards["lost"] == steps["lost"] == 2.0**53
    assert [shards["active_blocks"], steps["active_blocks"]] == [7.0, 4.0]
    assert [shards["parameter_squared_sum"], steps["parameter_squared_sum"]] == [5.0, 5.0]


def test_not_reported_stays_so_and_takes_no_part():
    """Wherever a part without anything stands."""
    some, none = ({"lost": np.array([np.nan, value])} for value in (1.0, np.nan))
    for merged in (merge_steps([{}, some, {}, none]), merge_shards([{}, some, {}, none])):
        np.testing.assert_array_equal(merged["lost"], [np.nan, 1.0])


def variances(*numbers):
    """Of numerator and denominator, and their covariance."""
    return {key: np.array([number]) for key, number in zip(VARIANCES, numbers, strict=True)}


def test_errors_that_persist_over_steps_add_as_standard_deviations():
    merged = merge_steps([variances(4.0, 9.0, 5.0)] * 16)
    assert merged["variance_numerator/edq_ratio"] == 16**2 * 4.0
    assert merged["variance_denominator/edq_ratio"] == 16**2 * 9.0
    roots = merged["variance_product_root/edq_ratio"]
    correlated = np.sqrt(16**2 * 4.0 * 16**2 * 9.0) * merged["covariance/edq_ratio"] / roots
    np.testing.assert_allclose(correlated, 16**2 * 5.0)


def test_over_shards_variances_are_additive_and_the_root_is_made_anew():
    """Of small ones, and of what rounding made negative, too."""
    root = "variance_product_root/edq_ratio"
    merged = merge_shards([variances(4.0, 1.0, 2.0), variances(5.0, 3.0, 1.0)])
    assert merged["variance_numerator/edq_ratio"] == 9.0
    np.testing.assert_allclose(merged[root], 6.0)
    np.testing.assert_allclose(merge_shards([variances(0.25, 0.09, 0.1)])[root], 0.15)
    for negative in ((-1e-20, 9.0, 0.0), (9.0, -1e-20, 0.0)):
        assert merge_shards([variances(*negative)])[root] == 0.0


@pytest.mark.parametrize(
    ("counts", "points", "starts"),
    [
        ([], 4, []),
        ([1] * 8, 4, [0, 2, 4, 6]),
        ([1] * 10, 4, [0, 3, 6, 9]),
        ([1] * 3, 4, [0, 1, 2]),
        ([16, 16, 1, 1, 1, 1], 3, [0, 1, 2]),
        ([16, 16, *[1] * 32], 5, [0, 1, 2, 18]),
        ([256, *[1] * 8], 100, [0, 1, 3, 6]),
    ],
    ids=["none", "even", "a rest", "few", "coarse before fine", "as wide as the coarse", "one far coarser"],
)
def test_where_merged_points_begin(counts, points, starts):
    assert merge_starts(np.array(counts, dtype=np.int64), points).tolist() == starts


@given(st.integers(1, 400), st.integers(1, 40))
def test_merging_twice_gives_the_points_of_merging_once(steps, points):
    starts = merge_starts(np.ones(steps, dtype=np.int64), points)
    assert len(starts) <= points
    merged = np.add.reduceat(np.ones(steps, dtype=np.int64), starts)
    assert len(set(merged[:-1])) <= 1
    assert merged[-1] <= merged[0]
    assert merge_starts(merged, points).tolist() == list(range(len(merged)))


def test_steps_that_are_alike_have_together_the_metrics_of_one():
    """Counts add up and noise averages out; every other metric says how it is, or how much of it."""
    totals = {key: np.array([place % 5 + 1.0]) for place, key in enumerate(KEYS)}
    one, three = (finish_all(merge_steps([totals] * count), intervals=False) for count in (1, 3))
    assert len(one) > 40
    for key, value in one.items():
        name = split_key(key)[0]
        if METRICS[name].unit != "elements" and "noise" not in name:
            np.testing.assert_allclose(three[key], value, rtol=1e-12, err_msg=key)
