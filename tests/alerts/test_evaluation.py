"""The server's evaluation of the catalogue: fires and ends when reckoned, as promtool confirms of the same runs."""

import math
from dataclasses import replace

import pytest
from collage_server.alerts.condition_evaluation import Evaluation, Sample, quantile

from collage_monitor.alerts import ALERTS, Alert, Condition
from tests.alerts.traces import CASES, fires, length_of, traces

RUN = (("run_id", "r"),)


def spans(name, time_scale=1.0):
    """(run_id, first minute, first minute after it) of each time the alert fires in the traces of its case."""
    evaluation, found, begun = Evaluation([ALERTS[name]], time_scale), [], {}
    held = traces(name)
    for minute in range(length_of(name)):
        samples = [
            Sample(trace.name, tuple(sorted(trace.labels.items())), trace.values[minute])
            for trace in held
            if trace.values[minute] is not None
        ]
        for change in evaluation.observe(60.0 * minute * time_scale, samples):
            run_id = dict(change.labels).get("run_id", "sick")
            if change.firing:
                begun[run_id] = minute
            else:
                found.append((run_id, begun.pop(run_id), minute))
    assert not begun
    return found


@pytest.mark.parametrize("name", ALERTS)
def test_it_fires_when_promtool_does(name):
    assert spans(name) == [("sick", *fires(name))]


def test_every_alert_has_a_case():
    assert list(CASES) == list(ALERTS)


def test_a_time_scale_shortens_it_alike():
    assert spans("CollageEdqLow", 1 / 60) == [("sick", *fires("CollageEdqLow"))]


def alert(*conditions, window=0.0, wait=0.0, warm_up=0, **more):
    return Alert("A", "", window, wait, warm_up, "info", "", "", (), "", conditions=conditions, **more)


def changes_of(entry, values, others=()):
    """(minute, whether it begins to fire, what the condition measures), of values of the series s, one a minute."""
    evaluation, found = Evaluation([entry]), []
    for minute, value in enumerate(values):
        samples = [*others, *([] if value is None else [Sample("s", RUN, value)])]
        found += [(minute, own.firing, own.value) for own in evaluation.observe(60.0 * minute, samples)]
    return found


NOISY = [1.0, 1.1, 0.9, 1.05, 0.95] * 4


@pytest.mark.parametrize(
    ("measure", "threshold", "values", "measured"),
    [
        # Deviations are robust, and a series without noise does not alarm.
        ("deviations", 8.0, [*NOISY, 1.2], None),
        ("deviations", 8.0, [*NOISY, 9.0, 1.0], None),
        ("deviations", 8.0, [*NOISY, 9.0], pytest.approx(77.9, abs=0.1)),
        ("deviations", 8.0, [*[1.0] * 20, 1.01], None),
        ("deviations", 8.0, [*[0.0] * 20, 1.0], math.inf),
        # Growth counts from nothing, forgets what is old, and before the first round there is none of it.
        ("growth", 0.0, [None, None, 3.0], 3.0),
        ("growth", 0.0, [3.0] * 20 + [5.0], 2.0),
        ("growth", 0.0, [5.0] * 12 + [1.0], None),
        ("growth", 0.0, [3.0], None),
        ("growth", 0.0, [3.0] * 5, None),
        ("growth", 0.0, [3.0, 3.0, 5.0], 2.0),
    ],
)
def test_what_a_condition_measures_at_the_last_of_the_values(measure, threshold, values, measured):
    entry = alert(Condition("s", ">", threshold, measure), window=600.0, keep_firing_seconds=0.0)
    found = [value for minute, firing, value in changes_of(entry, values) if firing and minute == len(values) - 1]
    assert found == ([] if measured is None else [measured])


def test_the_newest_within_the_window_counts_however_old():
    entry = alert(Condition("s", ">", 0.5, "recent"), window=600.0, wait=300.0, keep_firing_seconds=0.0)
    found = changes_of(entry, [0.9, *[None] * 12], [Sample("collage_step", RUN, 1.0)])
    assert [(minute, firing) for minute, firing, _ in found] == [(5, True), (11, False)]


def test_what_was_shown_under_another_strategy_is_not_recent():
    """A window of before a conversion kept an alert firing for an hour after it."""
    entry = ALERTS["CollageWindowUpdatesLost"]
    evaluation, changes = Evaluation([entry]), []
    for minute in range(40):
        strategy = "stochastic" if minute < 20 else "split-master"
        given = sampled("collage_lost_window_ratio", 0.9, strategy=strategy)
        changes += evaluation.observe(60.0 * minute, given if minute < 15 else given[1:])
    assert [change.firing for change in changes] == [True, False]


def test_an_alert_that_fired_before_a_restart_is_taken_over():
    entry = ALERTS["CollageReplicaMismatch"]
    evaluation = Evaluation([entry])
    evaluation.resume(entry, RUN, since=0.0, value=2.0)
    assert evaluation.observe(10.0, [Sample("collage_replica_mismatches", RUN, 2.0)]) == []
    assert evaluation.observe(20.0, []) == []
    (ended,) = evaluation.observe(20.0 + entry.keep_firing_seconds, [])
    assert (ended.firing, ended.since, ended.value) == (False, 0.0, 2.0)


STANDING = {"alert": "CollageEdqLow", "key": "edq_ratio"}
NAMED = {"project": "p", "run": "a", "run_id": "r", "strategy": "plain"}


def sampled(series, value, **names):
    """A sample beyond any warm-up, of a run under these names; other names are the sample's own labels."""
    labels, own = NAMED | names, NAMED | {name: value for name, value in names.items() if name in NAMED}
    return [
        Sample(series, tuple(sorted(labels.items())), value),
        Sample("collage_step", tuple(sorted(own.items())), 5000.0),
    ]


def test_a_run_under_another_name_or_strategy_goes_on_firing():
    """The old names' series end in that round; their end is none of the alert, nor does it fire twice."""
    evaluation, changes = Evaluation([ALERTS["CollageEdqDrop"]]), []
    names = {}
    for minute in range(90):
        if minute == 70:
            names = {"run": "a better name", "strategy": "light"}
        changes += evaluation.observe(
            60.0 * minute, sampled("collage_edq_ratio", 1.0 - 0.2 * (minute > 60), **names)
        )
    assert [change.firing for change in changes] == [True]
    (ended,) = [change for minute in (90, 100) for change in evaluation.observe(60.0 * minute, [])]
    assert (ended.firing, dict(ended.labels)["run"]) == (False, "a better name")


def test_a_rename_is_no_growth():
    evaluation = Evaluation([ALERTS["CollageExternalWrites"]])
    assert evaluation.observe(0.0, sampled("collage_external_writes", 3.0)) == []
    assert evaluation.observe(15.0, sampled("collage_external_writes", 3.0, run="b")) == []


def test_what_fired_before_a_restart_goes_on_under_another_name():
    entry = ALERTS["CollageEdqLow"]
    evaluation = Evaluation([entry])
    evaluation.resume(entry, tuple(sorted((NAMED | STANDING).items())), since=0.0, value=0.8)
    found = [
        change
        for minute in range(30)
        for change in evaluation.observe(60.0 * minute, sampled("collage_finding", 0.8, run="b", **STANDING))
    ]
    assert found == []


@pytest.mark.parametrize("name", ["project", "run", "strategy"])
def test_a_renamed_run_is_beyond_its_warm_up_at_once(name):
    entry = replace(ALERTS["CollageEdqLow"], for_seconds=0.0)
    evaluation = Evaluation([entry])
    evaluation.observe(0.0, sampled("collage_edq_ratio", 1.0))
    (fired,) = evaluation.observe(15.0, sampled("collage_finding", 0.8, **STANDING, **{name: "other"}))
    assert fired.firing


def test_a_fault_whose_worst_layer_changes_is_one():
    """Two layers that stand equally still took turns, and neither was the worst for long enough."""
    name = "CollageLayersStandStill"
    evaluation, changes = Evaluation([ALERTS[name]]), []
    for minute in range(30):
        key = "edq_ratio" if minute % 3 else "lost_update_ratio"
        labels = {"alert": name, "key": key, "layer": "ab"[minute % 2]}
        changes += evaluation.observe(60.0 * minute, sampled("collage_finding", 1.0, **labels))
    assert [change.firing for change in changes] == [True]


def test_a_finding_that_need_wake_nobody_fires_nothing():
    found = sampled("collage_finding", 0.94, key="edq_ratio")
    evaluation = Evaluation(ALERTS.values())
    assert [change for minute in range(90) for change in evaluation.observe(60.0 * minute, found)] == []


@pytest.mark.parametrize(
    ("step", "since_resume", "fires"),
    [(100.0, None, False), (101.0, None, True), (500.0, 49.0, False), (500.0, 50.0, True)],
)
def test_a_run_is_judged_after_its_warm_up_and_once_it_has_settled(step, since_resume, fires):
    entry = alert(Condition("s", ">", 0.5), warm_up=100, settle_steps=50)
    given = [Sample("s", RUN, 1.0), Sample("collage_step", RUN, step)]
    given += [] if since_resume is None else [Sample("collage_steps_since_resume", RUN, since_resume)]
    assert bool(Evaluation([entry]).observe(0.0, given)) is fires


@pytest.mark.parametrize(("last", "fires"), [(899.0, False), (900.0, True)])
def test_a_value_is_seen_for_less_than_five_minutes(last, fires):
    """Where no rounds took place no series ended: a value five minutes older than the window is not known."""
    evaluation = Evaluation([alert(Condition("s", ">", 4.0, "growth"), window=300.0)])
    evaluation.observe(0.0, [])
    found = [evaluation.observe(time, [Sample("s", RUN, value)]) for time, value in ((300.0, 3.0), (last, 5.0))]
    assert [bool(changes) for changes in found] == [False, fires]


def test_an_alert_ends_so_long_after_its_condition_held_last():
    entry = alert(Condition("s", ">", 0.5), keep_firing_seconds=120.0)
    found = changes_of(entry, [1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert [(minute, firing) for minute, firing, _ in found] == [(0, True), (5, False)]


def test_nan_is_less_than_any_number_and_the_first_recorded_gauge_counts():
    assert quantile([3.0, math.nan, 1.0], 1.0) == 3.0
    assert quantile([3.0, math.nan, 1.0], 0.75) == 2.0
    assert math.isnan(quantile([3.0, 1.0, math.nan], 0.0))
    entry = alert(Condition("collage:grad_norm", ">", 0.0))
    gauges = [Sample(f"collage_grad_norm{end}", RUN, value) for end, value in (("_unclipped", 7.0), ("", 1.0))]
    for given in (gauges, gauges[::-1]):
        assert [change.value for change in Evaluation([entry]).observe(0.0, given)] == [7.0]


@pytest.mark.parametrize("measure", ["value", "recent"])
def test_a_value_at_the_threshold_is_not_beyond_it(measure):
    low, high = Condition("s", "<", 0.5, measure), Condition("s", ">", 0.5, measure)
    for condition, beyond in ((low, 0.4), (high, 0.6)):
        assert [condition.is_beyond(value) for value in (0.5, beyond, 1.0 - beyond)] == [False, True, False]
