"""Each problem in one table: the evidence, the word, the few words, the sentence, and the alert that it is."""

import pytest

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.diagnosis import GRAVITY, PROBLEMS, Evidence, judge

STATE = "state_decrement_ratio/exp_avg_sq"
GOOD = {"edq_ratio": 1.0, STATE: 1.0, "lost_update_ratio": 0.0, "update_error_ratio": 0.0, "measured_ratio": 1.0}
LOST = {"lost_update_ratio": 0.576, "update_error_ratio": 0.5}
STILL = {"lost_update_ratio": 1.0, "update_error_ratio": 1.0, "edq_ratio": 0.0}
SIZES = {"elements": 64.0, "intended_norm": 1.0}
AVERAGE = {"average_edq_ratio": 0.2, "average_lost_ratio": 0.9, "average_moved_ratio": 0.03}
HALF_IDLE = {"elements": 1000.0, "idle": 500.0}
MOST_IDLE = {"elements": 1000.0, "idle": 900.0}
FOREACH = {"fingerprint": wire.Fingerprint(implementation="foreach", stochastic_rounding=False)}
WINDOW = {"edq_window_ratio/64": 0.8, **LOST}
MASTERS = wire.ResumeLoss(kind="masters", text="master weights are gone", step=50, lasting=True)
EPS = {"nonfinite_params": 3.0}
SUM = "state_increment_ratio/sum"


def evidence(model=None, layers=None, logged=None, now=None, **watch):
    info = wire.WatchInfo(optimizer="AdamW", **{"observed_strategy": "plain", "dtype": "bfloat16", **watch})
    return Evidence({**GOOD, **(model or {})}, layers or {}, info, 1, 100, logged=logged or {}, now=now or {})


TABLE = {
    "weights": (evidence(EPS), "not finite", "3 weights are not finite", "CollageNotFinite"),
    "residuals": (
        evidence({"residual_nonfinite": 2.0}),
        "not finite",
        "2 residuals are not finite",
        "CollageNotFinite",
    ),
    "loss": (evidence(logged={"loss": 7}), "not finite", "loss is not finite", ""),
    "lost": (evidence(LOST), "losing updates", "loses 57.6 % of its updates", "CollageUpdatesLost"),
    "a little lost": (
        evidence({**LOST, "lost_update_ratio": 0.2}),
        "losing updates",
        "loses 20.0 % of its updates",
        "",
    ),
    "EDQ": (evidence({"edq_ratio": 0.875}), "losing updates", "loses 12.5 % of its descent", "CollageEdqLow"),
    "EDQ a little low": (evidence({"edq_ratio": 0.94}), "losing updates", "loses 6.0 % of its descent", ""),
    "window": (
        evidence(WINDOW, strategy="stochastic"),
        "losing updates",
        "loses 20.0 % of its descent",
        "CollageEdqLow",
    ),
    "overshoot": (evidence({"edq_ratio": 1.2}), "steps are off", "updates overshoot", ""),
    "a layer": (
        evidence({}, {"norm.weight": SIZES | STILL, "b": {**SIZES, **GOOD}}),
        "losing updates",
        "1 layer stands still",
        "CollageLayersStandStill",
    ),
    "second moment": (
        evidence({STATE: 0.02}),
        "states are stuck",
        "exp_avg_sq is stuck",
        "CollageSecondMomentStuck",
    ),
    "second moment a little": (evidence({STATE: 0.8}), "states are stuck", "exp_avg_sq is stuck", ""),
    "sum": (evidence({SUM: 0.4}), "states are stuck", "sum is stuck", "CollageSecondMomentStuck"),
    "sum now": (
        evidence({SUM: 0.95}, now={SUM: 0.4}),
        "states are stuck",
        "sum is stuck",
        "CollageSecondMomentStuck",
    ),
    "sum a little": (evidence({SUM: 0.6}), "states are stuck", "sum is stuck", ""),
    "first moment": (
        evidence({"state_decrement_ratio/exp_avg": 0.02}),
        "states are stuck",
        "exp_avg is stuck",
        "",
    ),
    "fast": (evidence({STATE: 1.6}), "steps are off", "exp_avg_sq decays too fast", ""),
    "decay": (
        evidence({"decay_ratio": 0.1}, **FOREACH),
        "decay is lost",
        "weight decay is lost",
        "CollageDecayLost",
    ),
    "oracle": (
        evidence({"edq_oracle_ratio": 0.7}),
        "steps are off",
        "steps are not the oracle's",
        "CollageOracleDrift",
    ),
    "oracle a little": (evidence({"edq_oracle_ratio": 0.9}), "steps are off", "steps are not the oracle's", ""),
    "fill": (
        evidence({"residual_fill_ratio": 3.0}),
        "residuals are off",
        "residuals hold too much",
        "CollageResidualsOff",
    ),
    "dropped": (
        evidence({"residual_dropped_ratio": 0.45}),
        "residuals are off",
        "residuals were dropped",
        "CollageResidualsOff",
    ),
    # The judgement held these against the run, and the alert of that name was silent.
    "half idle": (
        evidence({**HALF_IDLE, "residual_dropped_ratio": 0.3}),
        "residuals are off",
        "residuals were dropped",
        "CollageResidualsOff",
    ),
    "most idle": (
        evidence({**MOST_IDLE, "residual_dropped_ratio": 0.08}),
        "residuals are off",
        "residuals were dropped",
        "CollageResidualsOff",
    ),
    "one layer of two": (
        evidence({}, {"a": {**SIZES, **GOOD, "residual_dropped_ratio": 1.0}, "b": {**SIZES, **GOOD}}),
        "residuals are off",
        "residuals were dropped",
        "CollageResidualsOff",
    ),
    "emptied": (
        evidence({"residual_zero_ratio": 1.0, "lost_visible_ratio": 0.52}),
        "losing updates",
        "52.0 % move no weight",
        "CollageResidualsOff",
    ),
    "resume": (
        evidence(resume_losses=[MASTERS]),
        "residuals are off",
        "a resume lost master weights",
        "CollageResumeLoss",
    ),
    "average": (evidence(AVERAGE), "average is off", "the average loses 90.0 %", "CollageAverageOff"),
    "average of another decay": (
        evidence({**AVERAGE, "average_lost_ratio": 0.0}),
        "average is off",
        "the average has another decay",
        "CollageAverageOff",
    ),
    "average not finite": (
        evidence({"average_nonfinite": 3.0}),
        "average is off",
        "the average is not finite",
        "CollageAverageOff",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_problem_is_one_word_few_words_a_sentence_and_an_alert(name):
    given, health, short, alert = TABLE[name]
    found = judge(given)
    assert (found.health, found.short, found.against[0].alert) == (health, short, alert)
    assert len(short.split()) <= 6
    assert found.headline.casefold().startswith(short.casefold().partition(" still")[0][:8])
    assert found.text.endswith(".")


def test_every_problem_stands_in_the_table_and_every_bad_word():
    told = {(found.health, found.alert) for given, *_ in TABLE.values() for found in judge(given).against}
    assert {word for word, _ in told} == set(GRAVITY)
    assert {alert for _, alert in told} - {""} == {one.alert.name for one in PROBLEMS if one.alert is not None}
    assert {alert for _, alert in told} - {""} <= set(ALERTS)


def test_one_fault_is_one_alert():
    """Residuals that were dropped are empty, too: two findings, and one wakes."""
    both = {"residual_dropped_ratio": 0.9, "residual_zero_ratio": 1.0, "lost_visible_ratio": 0.5}
    found = judge(evidence(both)).against
    assert len(found) == 2
    assert sorted(finding.alert for finding in found) == ["", "CollageResidualsOff"]
