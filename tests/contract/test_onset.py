"""The change point: found where there is one, not seen where there is none, told with the layers that changed."""

import tracemalloc
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from collage_monitor import onset as change_points
from collage_monitor.onset import Onset, find_onsets
from tests.contract.onsets import EVERY, changed, steady, within_one_interval
from tests.reference import onset as reference

find_onset: Any = change_points.find_onset
STEPS = [EVERY * (index + 1) for index in range(60)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.nightly)])
def test_changes_are_found_within_one_measured_interval_and_steady_traces_seem_not_to_change(count):
    """Of all changes 95 percent, of steady traces all but one percent."""
    for kind, share in ((changed, 0.95), (steady, 0.99)):
        assert sum(within_one_interval(kind(seed)) for seed in range(count)) >= share * count, kind


def series(seed, before=1.0, after=1.0, at=40, noise=0.001):
    values = before + noise * np.random.default_rng(seed).normal(size=len(STEPS))
    values[at:] += after - before
    return values


def test_what_is_told_of_a_change():
    layers = {f"layer {index}": series(index) for index in range(20)}
    layers |= {"layer 3": series(3, 0.99, 0.4), "layer 7": series(7, 0.98, 0.7)}
    found = find_onset(STEPS, series(99, 0.99, 0.95), layers)
    assert (found.last_before, found.first_changed, found.settled) == (STEPS[39], STEPS[40], STEPS[40])
    assert [change.layer for change in found.layers] == ["layer 3", "layer 7"]
    for own, levels in ((found, (0.99, 0.95)), (found.layers[0], (0.99, 0.4))):
        assert (own.before, own.after) == pytest.approx(levels, abs=0.002)


def test_a_change_of_a_few_layers_is_found_though_the_model_hides_it():
    layers = {f"layer {index}": series(index, 1.0, 0.9 if index == 3 else 1.0) for index in range(60)}
    found = find_onset(STEPS, series(99, noise=0.01), layers)
    assert [change.layer for change in found.layers] == ["layer 3"]


def test_among_many_series_a_change_must_stand_out_more():
    """Of sixty series one seems to change by chance where one alone does not."""
    model, fallen = series(99), series(129, 1.0, 0.992)
    many = {f"layer {index}": series(index) for index in range(60)}
    assert find_onset(STEPS, model, {"layer 3": fallen}) is not None
    assert find_onset(STEPS, model, many | {"layer 3": fallen}) is None


@pytest.mark.parametrize(
    ("after", "tolerance", "explained"), [(0.97, 0.0, False), (0.97, 0.05, True), (0.9, 0.05, True)]
)
def test_within_the_tolerance_of_the_ideal_there_is_nothing_to_explain(after, tolerance, explained):
    assert Onset(1, 2, 2, before=0.98, after=after).explains(1.0, tolerance) == explained


def test_a_layer_that_changed_by_less_than_counts_is_not_told_of_beside_others():
    layers = {"large": series(1, 0.99, 0.4), "small": series(2, 0.99, 0.98, noise=0.0001)}
    found = find_onset(STEPS, series(99, 0.99, 0.7), layers, least=0.05)
    assert [change.layer for change in found.layers] == ["large"]


@pytest.mark.parametrize(("points", "is_found"), [(0, False), (20, False), (23, False), (24, True)])
def test_so_many_points_are_looked_at(points, is_found):
    values = series(1, 0.99, 0.4, at=12)[:points]
    assert (find_onset(STEPS[:points], values) is not None) == is_found


@pytest.mark.parametrize("falls", [*((fall,) for fall in range(640, 656)), (1000, 2205)])
def test_a_change_within_a_point_of_several_steps_is_not_placed_before_it(falls):
    """A point of 16 steps is what its steps are together; of several changes each is placed in its own."""
    edq = 1.0 + 0.001 * np.random.default_rng(falls[0]).normal(size=1600 * len(falls))
    for fall in falls:
        edq[fall - 1 :] -= 0.5 / len(falls)
    ends = list(range(16, len(edq) + 1, 16))
    given = [end - 15 for end in ends], edq.reshape(-1, 16).mean(1)
    found = find_onsets(*given, last_steps=ends)
    assert len(found) == len(falls)
    assert len(falls) > 1 or [find_onset(*given, last_steps=ends)] == found
    for onset, fall in zip(found, falls, strict=True):
        assert onset.last_before < fall <= onset.first_changed <= onset.settled
    assert (edq[found[-1].settled - 1 :] < 0.6).all()


def test_steps_that_were_not_measured_widen_the_interval():
    values = series(0, 1.0, 0.5)
    values[37:44] = np.nan
    found = find_onset(STEPS, values)
    assert (found.last_before, found.first_changed) == (STEPS[36], STEPS[44])


def test_a_change_too_small_to_matter_is_none():
    values = series(0, 1.0, 0.99)
    assert find_onset(STEPS, values) is not None
    assert find_onset(STEPS, values, least=0.02) is None


@pytest.mark.parametrize(
    "values",
    [np.full(60, np.nan), np.ones(60), np.linspace(0, 1, 60), np.array([*[1.0] * 30, 0.2, *[1.0] * 29])],
    ids=["nothing measured", "constant", "a straight line", "one outlier"],
)
def test_nothing_changes_where_nothing_changes(values):
    assert find_onset(STEPS, values) is None
    assert find_onset(STEPS, values, {"layer": values, "other": np.full(60, np.nan)}) is None


def test_a_small_step_of_a_decline_is_not_since_when():
    """EDQ of a run that never was good and gets worse all the while, as weights grow; and a small step in it."""
    values = np.linspace(0.7, 0.1, 60) + 0.001 * np.random.default_rng(5).normal(size=60)
    values[40:] -= 0.05
    found = find_onset(STEPS, values, {"norm.bias": series(3, 1.18, 0.2), "head.weight": values})
    assert not found.explains(1.0)


def as_defined(found):
    """An answer in the form of the definition."""
    return None if found is None else (*astuple(found)[:-1], [astuple(one) for one in found.layers])


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 54), marks=pytest.mark.nightly)])
def test_every_answer_is_that_of_the_definition(seeds):
    for trace in (kind(seed) for seed in seeds for kind in (changed, steady)):
        given = trace.steps, trace.model, trace.layers
        assert as_defined(find_onset(*given, least=1e-4)) == reference.onset(*given, least=1e-4)


def long(points, layers, at):
    """Steps, the model and the layers of a run of so many points, a third of them missing, that changed at one."""
    generator = np.random.default_rng([points, at])
    steps = np.sort(generator.choice(2 * points, points, replace=False))
    fallen = np.where(np.arange(points) >= at, -0.2, 0.0)
    series = {f"layer {i}": 1 + fallen + 0.01 * generator.normal(size=points) for i in range(layers)}
    return steps.tolist(), 1 + fallen + 0.01 * generator.normal(size=points), series


@pytest.mark.slow
@pytest.mark.parametrize("points", [500, 2000])
@pytest.mark.parametrize("where", [0.02, 0.5, 0.98])
def test_a_long_series_is_answered_as_by_the_definition_and_to_the_step(points, where):
    at = int(where * points)
    steps, model, layers = long(points, 2, at)
    found = find_onset(steps, model, layers)
    assert as_defined(found) == reference.onset(steps, model, layers)
    assert (found.last_before, found.first_changed) == (steps[at - 1], steps[at])


def peak_bytes(points, layers):
    """The most that a question holds beside its series; the change is found to the step."""
    at = points // 3
    steps, model, series = long(points, layers, at)
    tracemalloc.start()
    try:
        found = find_onset(steps, model, series)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.first_changed, len(found.layers)) == (steps[at], layers)
    return peak


@pytest.mark.slow
def test_memory_grows_with_the_points_alone_and_with_the_layers_alone():
    """The most points that a journal holds take some megabytes."""
    assert peak_bytes(20_000, 0) < 4.5 * peak_bytes(5_000, 0)
    assert peak_bytes(90_000, 0) < 90_000 * 1024
    assert peak_bytes(60, 160) < 4.5 * peak_bytes(60, 40)
