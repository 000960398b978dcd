"""Finishing functions against exact rationals; a zero denominator is undefined, never 0, 1 or infinite."""

import math
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collage_monitor.metrics import HISTOGRAM_LABELS, METRICS, STATISTICS
from collage_monitor.statistics import (
    finish,
    finish_all,
    finished,
    finished_interval,
    has_interval,
    histogram_counts,
    histogram_quantile,
    interval,
    metric_keys,
    metric_sql,
    quoted_name,
)
from tests.contract.labels import key_of
from tests.reference import finish as reference

NAMES = [name for name, entry in STATISTICS.items() if entry.label is None and name != "measured_steps"]
amounts = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))


@pytest.mark.slow
@given(st.fixed_dictionaries(dict.fromkeys(NAMES, amounts)), st.integers(1, 10**6))
def test_every_ratio_and_norm_against_exact_arithmetic(totals, steps):
    totals["measured_steps"] = float(steps)
    expected = reference.metrics(totals)
    for key, value in expected.items():
        found = finish(key, {name: np.array(total) for name, total in totals.items()})
        if value is None:
            assert math.isnan(found), key
        else:
            cancelled = key in ("measured_ratio", "unchanged_ratio")
            tolerance = 1e-4 if cancelled else 1e-12
            if cancelled and totals["elements"] < 1e3 * totals["nonfinite"]:
                continue
            # Σ (e − u)² is a difference of sums: good to their rounding.
            parts = totals["effective_squared_sum"] + totals["intended_squared_sum"]
            parts += 2 * totals["intended_effective_sum"]
            beside = 1e-7 * (parts / totals["intended_squared_sum"]) ** 0.5 if key == "update_error_ratio" else 0.0
            assert float(found) == pytest.approx(float(value), rel=tolerance, abs=beside), key


def test_shapes_are_kept_and_gaps_stay_in_their_place():
    rows = {
        "lost": [1.0, 0.0, np.nan],
        "elements": [4.0, 3.0, 5.0],
        "nonfinite": [0.0] * 3,
        "idle": [0.0, 3.0, 0.0],
    }
    totals = {key: np.array([values, values]) for key, values in rows.items()}
    np.testing.assert_array_equal(finish("lost_update_ratio", totals), [[0.25, np.nan, np.nan]] * 2)


def arrays(**totals):
    """Totals by name, / for the double underscores of keywords."""
    return {key.replace("__", "/"): np.array(value) for key, value in totals.items()}


def test_shares_leave_out_elements_without_an_intended_update():
    """A layer of 1,000 elements without a u beside one of 10, of which 5 were lost: half, not half a percent."""
    totals = arrays(elements=1010.0, nonfinite=0.0, idle=0.0, lost=5.0, distorted=1.0, faithful=4.0)
    assert finish("lost_update_ratio", totals) == 0.5
    assert finish("measured_ratio", totals) == 10 / 1010


def test_what_was_not_reported_is_undefined_and_not_offered():
    totals = {"intended_squared_sum": np.ones(2), "measured_steps": np.ones(2)}
    assert metric_keys(totals) == ["intended_norm"]
    np.testing.assert_array_equal(finish("edq_ratio", totals), [np.nan, np.nan])
    assert set(finish_all(totals)) == {"intended_norm"}
    assert np.isnan(finish("edq_ratio", {}))
    assert finish_all({}) == {}


def test_labelled_metrics_by_hand():
    totals = arrays(
        window_intended_squared_sum__8=16.0,
        window_intended_effective_sum__8=12.0,
        window_effective_squared_sum__8=9.0,
        window_intended_visible_sum__8=4.0,
        window_visible_squared_sum__8=4.0,
        window_active__8=10.0,
        window_lost__8=1.0,
        window_lost_visible__8=4.0,
        counterfactual_squared_sum=8.0,
        counterfactual_kept_sum__plain__bf16=6.0,
        counterfactual_variance_sum__stochastic__bf16=16.0,
        gradient_nonzero=20.0,
        state_zero__exp_avg_sq=5.0,
        state_decrement_observed_sum__exp_avg_sq=-1.0,
        state_decrement_intended_sum__exp_avg_sq=-4.0,
    )
    assert finish_all(totals) == {
        "edq_window_ratio/8": 0.75,
        "edq_window_cosine/8": 1.0,
        "lost_window_ratio/8": 0.1,
        "edq_visible_window_ratio/8": 0.25,
        "edq_visible_window_cosine/8": 0.5,
        "lost_visible_window_ratio/8": 0.4,
        "counterfactual_edq_ratio/plain/bf16": 0.75,
        "counterfactual_variance_ratio/stochastic/bf16": 2.0,
        "state_zero_ratio/exp_avg_sq": 0.25,
        "state_decrement_ratio/exp_avg_sq": 0.25,
    }
    nothing = {key: np.array(0.0) for key in totals}
    assert all(np.isnan(value) for value in finish_all(nothing).values())


def histogram(**counts):
    return {f"update_ulp_histogram/{label}": np.array(counts.get(label, 0.0)) for label in HISTOGRAM_LABELS}


def test_histogram_readings_by_hand():
    totals = histogram(**{"-3": 10.0, "-2": 10.0, "-1": 20.0, "0": 40.0})
    assert finish("predicted_plain_lost_ratio", totals) == 0.25
    assert finish("half_ulp_margin", totals) == pytest.approx(0.0 + 1.0)
    assert finish("half_ulp_lr_factor", totals) == pytest.approx(2.0 ** (-1 - (-3 + 0.8)))


def test_after_the_factor_a_tenth_stands_below_half_a_gap():
    generator = np.random.default_rng(3)
    logarithms = generator.normal(-3.0, 2.0, 200_000)
    octaves, counts = np.unique(np.floor(logarithms).astype(int), return_counts=True)
    totals = histogram(**dict(zip(map(str, octaves), counts.astype(float), strict=True)))
    factor = finish("half_ulp_lr_factor", totals)
    assert np.mean(logarithms + np.log2(factor) < -1) == pytest.approx(0.1, abs=0.01)
    assert finish("half_ulp_margin", totals) == pytest.approx(np.median(logarithms) + 1, abs=0.02)
    assert finish("predicted_plain_lost_ratio", totals) == np.mean(logarithms < -1)


def test_an_empty_histogram_is_undefined_and_its_ends_answer_the_outermost_edge():
    assert np.isnan(finish("half_ulp_margin", histogram()))
    assert np.isnan(finish("predicted_plain_lost_ratio", histogram()))
    counts = histogram_counts({key: np.array([value, 0.0]) for key, value in histogram(underflow=5.0).items()})
    np.testing.assert_array_equal(histogram_quantile(counts, 0.5), [-24.0, np.nan])
    assert histogram_quantile(histogram_counts(histogram(overflow=5.0)), 0.5) == 8.0
    # On the border of an octave it is that border, whatever lies beyond; bins may be unreported.
    border = arrays(update_ulp_histogram__0=4.0, update_ulp_histogram__5=4.0)
    assert histogram_quantile(histogram_counts(border), 0.5) == 1.0
    unreported = finish("half_ulp_margin", arrays(update_ulp_histogram__0=[4.0, np.nan]))
    np.testing.assert_array_equal(unreported, [1.5, np.nan])


def test_nothing_of_a_negative_total_is_a_plain_zero():
    found = finish("edq_ratio", {"intended_effective_sum": np.zeros(1), "intended_squared_sum": -np.ones(1)})
    assert str(found) == "[0.]"


def test_an_interval_needs_the_variances():
    totals = arrays(elements=4096.0, sampled=1024.0, active_blocks=64.0)
    totals |= arrays(intended_effective_sum=3.0, intended_squared_sum=4.0)
    assert not has_interval("edq_ratio", totals)
    assert finished_interval("edq_ratio", totals) is None
    assert "edq_ratio_low" not in finish_all(totals)
    kinds = ("variance_numerator", "variance_denominator", "covariance")
    totals |= {f"{kind}/edq_ratio": np.array(0.01) for kind in kinds}
    assert has_interval("edq_ratio", totals)
    assert not has_interval("edq_cosine", totals | {"variance_numerator/edq_cosine": np.array(0.01)})
    bounds = low, high = finished_interval("edq_ratio", totals) or pytest.fail("no interval")
    assert low < 0.75 < high
    assert bounds == interval("edq_ratio", totals)
    found = finish_all(totals)
    assert (found["edq_ratio_low"], found["edq_ratio_high"]) == bounds
    assert finish_all(totals, intervals=False) == {key: found[key] for key in metric_keys(totals)}


@pytest.mark.parametrize("without", ["", "distorted"])
def test_sql_gives_what_the_functions_give(without):
    """In a database that calls a root below zero null, as numpy's NaN is."""
    generator, rows = np.random.default_rng(0), 40
    keys = [key_of(own) for name, own in STATISTICS.items() if own.label != "octave" and name != without]
    totals = {key: generator.integers(-1, 4, rows).astype(np.float64) for key in keys}
    told = {key: sql for key in metric_keys(totals) if (sql := metric_sql(key, totals)) is not None}
    known = {METRICS[key.partition("/")[0]].finish for key in told}
    assert len(known) > 5, "each kind of ratio is there"
    # SQLite divides by 0 as told; to others it is infinity, or an error.
    assert all(sql.count(" / ") == sql.count(" / nullif(") for sql in told.values())
    with closing(sqlite3.connect(":memory:")) as database:
        database.create_function("sqrt", 1, lambda value: None if value is None else math.sqrt(value))
        names = ", ".join(map(quoted_name, keys))
        database.execute(f"CREATE TABLE totals ({names})")
        marks = ", ".join("?" * len(keys))
        database.executemany(f"INSERT INTO totals VALUES ({marks})", zip(*totals.values(), strict=True))
        for key, sql in told.items():
            found = [value for (value,) in database.execute(f"SELECT {sql} FROM totals")]
            expected = finished(key, totals, (rows,))
            np.testing.assert_allclose(np.array(found, dtype=np.float64), expected, rtol=1e-12, err_msg=key)


def test_what_is_no_ratio_of_totals_has_no_sql_and_any_name_is_quoted():
    for key in ("half_ulp_margin", "predicted_plain_lost_ratio", "edq"):
        assert metric_sql(key, ["update_ulp_histogram"]) is None
    assert metric_sql("elements", ["elements"]) == '"elements"'
    assert quoted_name('a "b"') == '"a ""b"""'
