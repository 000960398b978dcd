"""Statistics over seeds against exact fractions and integrated quantiles; their coverage; who is paired."""

from typing import Any

import numpy as np
import pytest

from collage_monitor import seeds, wire
from collage_monitor.seeds import SeedValue
from collage_monitor.statistics.intervals import student_quantile
from tests.reference import seeds as reference

LOSSES = [2.431, 2.4198, 2.4275, 2.442, 2.4111]
OTHERS = [2.5188, 2.497, 2.5302]


mean_over_seeds: Any = seeds.mean_over_seeds
difference: Any = seeds.difference
curve_over_seeds: Any = seeds.curve_over_seeds


def of_seeds(values, seeded=True, group=None):
    return [SeedValue(value, group, place if seeded else None) for place, value in enumerate(values)]


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 7, 12, 30, 200])
def test_students_quantile_is_the_integral_of_its_density(degrees):
    # At 4 degrees the expansion in 1 / degrees is furthest off.
    tolerance = 0.008 if degrees == 4 else 0.003
    assert float(student_quantile(degrees)) == pytest.approx(reference.student_quantile(degrees), abs=tolerance)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_mean_and_its_interval_are_those_of_exact_fractions(count):
    found = mean_over_seeds(LOSSES[:count])
    middle, half, spread = reference.mean(LOSSES[:count])
    assert found.value == pytest.approx(middle, rel=1e-14)
    assert found.spread == pytest.approx(spread, rel=1e-9)
    assert found.high - found.value == pytest.approx(half, rel=3e-3)
    assert found.value - found.low == pytest.approx(half, rel=3e-3)


def test_the_spread_of_a_loss_that_ran_away_is_a_number():
    found = mean_over_seeds([1e200, 3e200])
    assert (found.value, found.spread) == (2e200, pytest.approx(2**0.5 * 1e200, rel=1e-14))


def test_one_value_has_no_interval_and_no_value_no_mean():
    one = mean_over_seeds([2.5])
    assert (one.value, one.count, one.low, one.high, one.spread) == (2.5, 1, None, None, None)
    assert mean_over_seeds([]) is None
    assert difference([], [SeedValue(1.0)]) is None


def test_runs_of_one_seed_are_compared_with_each_other():
    own = [value + 0.01 + place / 1000 for place, value in enumerate(LOSSES)]
    found = difference(of_seeds(own), of_seeds(LOSSES, group="g")[::-1])
    middle, half, _ = reference.mean([0.01, 0.011, 0.012, 0.013, 0.014])
    assert found.paired
    assert found.count == 5
    assert found.value == pytest.approx(middle)
    assert found.high - found.value == pytest.approx(half, rel=1e-2), "what a seed does to both has cancelled"


def test_group_and_seed_come_before_the_seed_alone():
    both = [SeedValue(1.0, "a", 1), SeedValue(5.0, "b", 1)]
    found = difference(both, [SeedValue(0.5, "a", 1), SeedValue(4.5, "b", 1)])
    assert (found.value, found.count, found.paired) == (0.5, 2, True)


def test_without_pairs_it_is_welchs_interval():
    found = difference(of_seeds(OTHERS, seeded=False), of_seeds(LOSSES, seeded=False))
    gap, half = reference.welch(OTHERS, LOSSES)
    assert not found.paired
    assert found.value == pytest.approx(gap, rel=1e-12)
    assert found.high - found.value == pytest.approx(half, rel=3e-3)
    twice = [SeedValue(1.0, seed=1), SeedValue(2.0, seed=1)]
    assert not difference(twice, [SeedValue(0.0, seed=1)]).paired, "a seed that names two runs pairs none"


@pytest.mark.slow
@pytest.mark.parametrize(("paired", "most"), [(True, 0.97), (False, 0.98)], ids=["paired", "Welch, rounded down"])
def test_intervals_hold_the_truth_in_95_of_100(paired, most):
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(2000):
        shared = generator.normal(size=3)
        own = 1.0 + shared + generator.normal(size=3) * 0.1
        others = shared if paired else generator.normal(size=5) * 2
        found = difference(*(of_seeds(values.tolist(), paired) for values in (own, others)))
        held += found.low <= 1.0 <= found.high
    assert 0.93 <= held / 2000 <= most


def curve(steps, values):
    return wire.Series(
        run_id="run",
        metric="loss",
        layer=None,
        axis="step",
        first_steps=steps,
        steps=steps,
        positions=[float(step) for step in steps],
        values=values,
        minimum=values,
        maximum=values,
    )


def test_a_mean_curve_goes_as_far_as_every_run_and_has_its_band():
    found = curve_over_seeds([curve([10, 20, 30], [1.0, 2.0, 3.0]), curve([10, 15, 20, 25], [3.0, None, 4.0, 9.0])])
    assert found.steps == found.first_steps == [10, 20]
    assert found.positions == [10.0, 20.0]
    assert found.values == [2.0, 3.0]
    middle, half, _ = reference.mean([2.0, 4.0])
    assert found.low[1] == pytest.approx(middle - half)
    assert found.high[1] == pytest.approx(middle + half)


def test_a_mean_curve_has_a_gap_where_one_run_has():
    found = curve_over_seeds([curve([1, 2, 3], [1.0, "NaN", 1.0]), curve([1, 2, 3], [1.0, 1.0, None])])
    assert found.values == [1.0, None, None]
    assert curve_over_seeds([curve([1], [1.0]), curve([], [])]).steps == []
    with pytest.raises(ValueError, match="one run or more"):
        curve_over_seeds([])
