"""No good word from edq_ratio alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collage_monitor.judgement import judge, longest_window

STATE = "state_decrement_ratio/exp_avg_sq"
values = st.none() | st.floats(-2, 3) | st.just("NaN")


def test_edq_alone_is_not_known():
    verdict = judge({"edq_ratio": 1.0})
    assert verdict.health == "unknown"
    assert "not known" in verdict.text


def test_a_state_that_decays_is_a_second_witness():
    assert judge({"edq_ratio": 0.999, STATE: 0.98}).health == "healthy"


def test_the_oracle_is_a_second_witness():
    assert judge({"edq_ratio": 1.0, "edq_oracle_ratio": 1.01}).health == "healthy"


@pytest.mark.parametrize(
    ("metrics", "health", "word"),
    [
        ({"edq_ratio": 0.84, STATE: 0.0, "edq_oracle_ratio": 1.0}, "losing updates", "updates are lost"),
        ({"edq_ratio": 1.2, STATE: 1.0}, "steps are off", "overshoot"),
        ({"edq_ratio": 1.0, STATE: 0.02, "edq_oracle_ratio": 0.7}, "states are stuck", "exp_avg_sq does not decay"),
        ({"edq_ratio": 1.0, STATE: 1.0, "edq_oracle_ratio": 0.7}, "steps are off", "oracle disagrees"),
        ({"edq_ratio": 1.0, STATE: 1.0, "state_decrement_ratio/exp_avg": 1.6}, "steps are off", "decays too fast"),
    ],
)
def test_one_contradiction_is_enough(metrics, health, word):
    verdict = judge(metrics)
    assert verdict.health == health
    assert word in verdict.text.lower()


def test_the_longest_window_speaks_in_place_of_single_steps():
    one_step = {"edq_ratio": 1.0, STATE: 1.0, "edq_window_ratio/8": 0.99, "edq_window_ratio/64": 0.7}
    verdict = judge(one_step)
    assert verdict.health == "losing updates"
    assert "over 64 steps is 0.700" in verdict.text
    assert judge({**one_step, "edq_window_ratio/64": None}).health == "healthy"
    assert "over 8 steps" in judge({**one_step, "edq_window_ratio/64": None}).text
    assert longest_window(one_step, "lost_window_ratio") is None
    assert longest_window({"edq_window_ratio/x": 1.0}, "edq_window_ratio") is None


def test_nothing_measured_is_not_known():
    assert judge({}).health == "unknown"
    assert judge({"edq_ratio": "NaN", STATE: 1.0}).health == "unknown"


@given(values, values, values)
def test_a_good_word_always_has_two_witnesses(edq, state, oracle):
    if judge({"edq_ratio": edq, STATE: state, "edq_oracle_ratio": oracle}).health == "healthy":
        assert abs(1 - edq) <= 0.05
        assert isinstance(state, float) or isinstance(oracle, float)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"edq_ratio": None}, "unknown"),
        ({"edq_ratio": 1.0}, "unknown"),
        ({"edq_ratio": 1.0, "state_decrement_ratio/exp_avg_sq": None}, "unknown"),
        ({"edq_ratio": 1.0, "state_decrement_ratio/exp_avg_sq": 1.0}, "healthy"),
        ({"edq_ratio": 1.0, "edq_oracle_ratio": 1.01}, "healthy"),
        ({"edq_ratio": 1.0, "state_decrement_ratio/exp_avg_sq": 0.02}, "states are stuck"),
        ({"edq_ratio": 1.0, "state_decrement_ratio/exp_avg_sq": 1.0, "edq_oracle_ratio": 0.7}, "steps are off"),
        ({"edq_ratio": 1.3, "state_decrement_ratio/exp_avg_sq": 1.0}, "steps are off"),
        ({"edq_ratio": 0.5, "state_decrement_ratio/exp_avg_sq": 1.0, "edq_oracle_ratio": 1.0}, "losing updates"),
    ],
)
def test_health_needs_a_second_witness(model, expected):
    assert judge(model).health == expected
