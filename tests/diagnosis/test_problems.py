"""Each problem in one table: the evidence, the word, the few words, the sentence, and the alert that it is."""

import pytest

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.diagnosis import GRAVITY, PROBLEMS
from tests.diagnosis.test_judgement import FIRST, GOOD, STATE, STILL, SUM, judged, layer, seen

LOST = {"lost_update_ratio": 0.576, "update_error_ratio": 0.5}
AVERAGE = {"average_edq_ratio": 0.2, "average_lost_ratio": 0.9, "average_moved_ratio": 0.03}
STANDING = {"layers": {"norm.weight": layer(**STILL), "b": layer()}}
ONE_DROPPED = {"layers": {"a": layer(residual_dropped_ratio=1.0), "b": layer()}}
EMPTIED = {"residual_zero_ratio": 1.0, "lost_visible_ratio": 0.52}
MASTERS = wire.ResumeLoss(kind="masters", text="master weights are gone", step=50, lasting=True)


def given(numbers, health, short, alert="", **facts):
    """The numbers are good but for these; the facts are those of the watch and of the evidence."""
    return {**GOOD, **numbers}, facts, health, short, alert


def dropped(share, idle=0.0):
    """Residuals of a thousand elements."""
    return {"residual_dropped_ratio": share, "elements": 1000.0, "idle": idle}


TABLE = {
    "weights": given({"nonfinite_params": 3.0}, "not finite", "3 weights are not finite", "CollageNotFinite"),
    "residuals": given({"residual_nonfinite": 2.0}, "not finite", "2 residuals are not finite", "CollageNotFinite"),
    "loss": given({}, "not finite", "loss is not finite", logged={"loss": 7}),
    "lost": given(LOST, "losing updates", "loses 57.6 % of its updates", "CollageUpdatesLost"),
    "a little lost": given({**LOST, "lost_update_ratio": 0.2}, "losing updates", "loses 20.0 % of its updates"),
    "EDQ": given({"edq_ratio": 0.875}, "losing updates", "loses 12.5 % of its descent", "CollageEdqLow"),
    "EDQ a little low": given({"edq_ratio": 0.94}, "losing updates", "loses 6.0 % of its descent"),
    "window": given(
        {"edq_window_ratio/64": 0.8, **LOST},
        "losing updates",
        "loses 20.0 % of its descent",
        "CollageEdqLow",
        strategy="stochastic",
    ),
    "overshoot": given({"edq_ratio": 1.2}, "steps are off", "updates overshoot"),
    "a layer": given({}, "losing updates", "1 layer stands still", "CollageLayersStandStill", **STANDING),
    "second moment": given({STATE: 0.02}, "states are stuck", "exp_avg_sq is stuck", "CollageSecondMomentStuck"),
    "second moment a little": given({STATE: 0.8}, "states are stuck", "exp_avg_sq is stuck"),
    "sum": given({SUM: 0.4}, "states are stuck", "sum is stuck", "CollageSecondMomentStuck"),
    "sum now": given({SUM: 0.95}, "states are stuck", "sum is stuck", "CollageSecondMomentStuck", now={SUM: 0.4}),
    "sum a little": given({SUM: 0.6}, "states are stuck", "sum is stuck"),
    "sum backwards": given({SUM: -0.5}, "states are stuck", "sum shrinks instead", "CollageSecondMomentStuck"),
    "sum fast": given({SUM: 1.4}, "steps are off", "sum grows too fast"),
    "first moment": given({FIRST: 0.02}, "states are stuck", "exp_avg is stuck"),
    "fast": given({STATE: 1.6}, "steps are off", "exp_avg_sq decays too fast"),
    "decay": given(
        {"decay_ratio": 0.1}, "decay is lost", "weight decay is lost", "CollageDecayLost", **seen("foreach")
    ),
    "oracle": given({"edq_oracle_ratio": 0.7}, "steps are off", "steps are not the oracle's", "CollageOracleDrift"),
    "oracle a little": given({"edq_oracle_ratio": 0.9}, "steps are off", "steps are not the oracle's"),
    "fill": given(
        {"residual_fill_ratio": 3.0}, "residuals are off", "residuals hold too much", "CollageResidualsOff"
    ),
    "dropped": given(dropped(0.45), "residuals are off", "residuals were dropped", "CollageResidualsOff"),
    # The judgement held these against the run, and the alert of that name was silent.
    "half idle": given(dropped(0.3, 500.0), "residuals are off", "residuals were dropped", "CollageResidualsOff"),
    "most idle": given(dropped(0.08, 900.0), "residuals are off", "residuals were dropped", "CollageResidualsOff"),
    "a layer's": given({}, "residuals are off", "residuals were dropped", "CollageResidualsOff", **ONE_DROPPED),
    "emptied": given(EMPTIED, "losing updates", "52.0 % move no weight", "CollageResidualsOff"),
    "resume": given(
        {}, "residuals are off", "a resume lost master weights", "CollageResumeLoss", resume_losses=[MASTERS]
    ),
    "average": given(AVERAGE, "average is off", "the average loses 90.0 %", "CollageAverageOff"),
    "average of another decay": given(
        AVERAGE | {"average_lost_ratio": 0.0},
        "average is off",
        "the average has another decay",
        "CollageAverageOff",
    ),
    "average not finite": given(
        {"average_nonfinite": 3.0}, "average is off", "the average is not finite", "CollageAverageOff"
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_problem_is_one_word_few_words_a_sentence_and_an_alert(name):
    numbers, facts, health, short, alert = TABLE[name]
    found = judged(numbers, **facts)
    assert (found.health, found.short, found.against[0].alert) == (health, short, alert)
    assert len(short.split()) <= 6
    assert found.headline.casefold().startswith(short.casefold().partition(" still")[0][:8])
    assert found.text.endswith(".")


def test_every_problem_stands_in_the_table_and_every_bad_word():
    against = [found for numbers, facts, *_ in TABLE.values() for found in judged(numbers, **facts).against]
    alerts = {found.alert for found in against} - {""}
    assert {found.health for found in against} == set(GRAVITY)
    assert alerts == {one.alert.name for one in PROBLEMS if one.alert is not None}
    assert alerts <= set(ALERTS)


def test_one_fault_is_one_alert():
    """Residuals that were dropped are empty, too: two findings, and one wakes."""
    found = judged({**GOOD, **EMPTIED, "residual_dropped_ratio": 0.9}).against
    assert sorted(finding.alert for finding in found) == ["", "CollageResidualsOff"]
