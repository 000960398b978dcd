"""What is kept of measured steps is what merging them by the catalogue's rules gives, however little the room."""

import numpy as np
import pytest
import torch
from collage_agent.measurement import Layout, Measurement
from collage_agent.watching.step_history import MODEL, StepHistory

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS, STATISTICS, statistic
from collage_monitor.statistics import reduce_shards, reduce_steps

KEYS = (
    "measured_steps",
    "elements",
    "active_blocks",
    "nonfinite_parameters",
    "parameter_squared_sum",
    "intended_squared_sum",
    "update_ulp_histogram/-3",
    "variance_numerator/edq_ratio",
    "variance_denominator/edq_ratio",
    "covariance/edq_ratio",
    "window_active/8",
    "fourth_moment/edq_ratio",
)
LAYERS = 5


def layout(statistics, layers):
    watched = [
        wire.Layer(name=f"layer {index}", shape=[4], dtype="bfloat16", elements=4) for index in range(layers)
    ]
    return Layout(tuple(watched), tuple(statistics), wire.WatchInfo(optimizer="AdamW"))


def steps(count, statistics=KEYS, layers=LAYERS, first=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    told = layout(statistics, layers)
    for step in range(first, first + count):
        totals = torch.rand(len(statistics), layers, generator=generator, dtype=torch.float64)
        totals[torch.rand(totals.shape, generator=generator) < 0.2] = torch.nan
        totals[0] = 1.0
        # The variances of a layer are reported together.
        pairs = [row for row, key in enumerate(statistics) if key.startswith("variance")]
        totals[pairs] = torch.where(totals[pairs].isnan().any(0), torch.nan, totals[pairs])
        yield Measurement(told, step, 0.0, totals)


def past_of(measurements, history=None):
    """What is kept of all of them."""
    history = history or StepHistory()
    for measurement in measurements:
        history.add(measurement)
    past = history.past()
    assert past is not None
    return past


def of_squares(squares, first=1):
    """A measured step each, of one layer, that says its number and how far it was to go."""
    told = layout(("measured_steps", "intended_squared_sum"), 1)
    for step, square in enumerate(squares, start=first):
        yield Measurement(told, step, 0.0, torch.tensor([[1.0], [square]], dtype=torch.float64))


def merged(measurements):
    """All steps by the contract: shards first, then steps; the model in the first column."""
    width = max(len(measurement.layout.layers) for measurement in measurements)
    tables = []
    for measurement in measurements:
        table = dict(measurement.table())
        model = reduce_shards(table, axis=0)
        padded = {key: np.pad(row, (0, width - len(row)), constant_values=np.nan) for key, row in table.items()}
        tables.append({key: np.append(model[key], row) for key, row in padded.items()})
    keys = dict.fromkeys(key for table in tables for key in table)
    gap = np.full(width + 1, np.nan)
    return reduce_steps({key: np.stack([table.get(key, gap) for table in tables]) for key in keys}, axis=0)


def test_every_merge_rule_of_the_catalogue_is_compared_with_the_contract():
    compared = [statistic(key) for key in KEYS]
    for rule in ("over_shards", "over_steps"):
        used = {getattr(entry, rule) for entry in STATISTICS.values()}
        assert {getattr(entry, rule) for entry in compared} == used


@pytest.mark.parametrize("room", [1, 4_000, 10**6], ids=["hardly any room", "little room", "room for all"])
@pytest.mark.parametrize("count", [1, 7, 50])
def test_merged_steps_are_those_of_the_contract(room, count):
    measurements = list(steps(count))
    past = past_of(measurements, StepHistory(room))
    assert (past.first_steps[0], past.last_steps[-1]) == (1, count)
    whole = reduce_steps(past.totals, axis=0)
    expected = merged(measurements)
    assert set(whole) == set(expected) - {"update_ulp_histogram/-3"}
    for key, values in whole.items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-12, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 40_000, 200_000])
def test_no_measured_step_is_lost_when_tables_grow_and_room_for_points_shrinks(room):
    history = StepHistory(room)
    for measurement in (*steps(300, KEYS[:6], 2), *steps(40, KEYS, 300, first=301, seed=1)):
        history.add(measurement)
        if measurement.step % 20 == 0:
            past = past_of([], history)
            assert past.totals["measured_steps"][:, MODEL].sum() == past.last_steps[-1] == measurement.step
            assert all(a < b for a, b in zip(past.last_steps, past.first_steps[1:], strict=False))


def test_statistics_and_layers_may_come_later():
    measurements = [*steps(20, KEYS[:6], 2), *steps(20, KEYS, LAYERS, first=21, seed=1)]
    expected = merged(measurements)
    for key, values in reduce_steps(past_of(measurements, StepHistory(1)).totals, axis=0).items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-12, err_msg=key)


def test_steps_before_and_after_a_change_are_never_merged():
    """However often neighbours are merged to make room."""
    history = StepHistory(1)
    past_of(of_squares([1.0] * 151), history)
    history.begin_anew()
    for last in range(152, 400):
        past = past_of(of_squares([100.0], last), history)
        assert 152 in past.first_steps
        found = past.recent(152)
        assert found.last_steps[-1] == last
        merged = found.totals["measured_steps"][:, MODEL].sum()
        assert found.totals["intended_squared_sum"][:, MODEL].sum() == 100.0 * merged
        assert merged >= min(32, last - 151)


@pytest.mark.slow
def test_memory_is_bounded():
    history, sizes = StepHistory(30_000), []
    for measurement in steps(1000):
        history.add(measurement)
        sizes.append(history.bytes)
    assert max(sizes) < 3 * 30_000
    past = past_of([], history)
    assert 8 <= len(past.first_steps) <= 130
    assert list(past.first_steps) == sorted(past.first_steps)


def test_the_recent_past_has_enough_steps_and_enough_of_the_descent():
    """At the end of a schedule to 0 the last steps are next to nothing, and do not speak for the run."""

    def recent(squares):
        found = past_of(of_squares(squares)).recent(0)
        steps_merged = found.totals["measured_steps"][:, MODEL].sum()
        assert steps_merged == found.last_steps[-1] - found.first_steps[0] + 1
        return found.first_steps[0], found.last_steps[-1]

    assert recent([1.0] * 10) == (1, 10)
    assert recent([1.0] * 100) == (69, 100)
    assert recent([1.0] * 301) == (270, 301), "the newest steps are not merged: a server takes the same ones"
    assert recent([(1 - step / 100) ** 2 for step in range(100)])[0] == pytest.approx(
        100 * (1 - 0.05 ** (1 / 3)), abs=2
    )


def test_what_ended_keeps_its_last_value_and_what_never_was_stays_missing():
    lasting = [row for row, key in enumerate(KEYS) if statistic(key).over_steps == "last"]
    measurements = list(steps(50))
    for measurement in measurements:
        measurement.totals[lasting] = 7.0 if measurement.step == 1 else torch.nan
        measurement.totals[[row for row, key in enumerate(KEYS) if "variance" in key], 0] = torch.nan
    past = past_of(measurements, StepHistory(1))
    assert len(past.first_steps) < 50
    whole = reduce_steps(past.totals, axis=0)
    for row in lasting:
        assert whole[KEYS[row]][1:].tolist() == [7.0] * LAYERS
    roots = past.totals["variance_product_root/edq_ratio"]
    assert np.isnan(roots[:, 1]).all()
    assert np.isfinite(roots[:, 2:]).any()


def test_of_thinned_grids_the_newest_is_kept():
    keys = ("measured_steps", *(f"update_ulp_histogram/{label}" for label in HISTOGRAM_LABELS))
    history = StepHistory()
    for measurement in steps(64, keys):
        history.add(measurement)
    record = history.grids("plain")
    assert record is not None
    assert record.steps[-1] == 64
    assert len(record.steps) == 32
