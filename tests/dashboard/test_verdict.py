"""No good word from edq_ratio alone."""

import pytest
from collage_dashboard.verdict import judge
from hypothesis import given
from hypothesis import strategies as st

STATE = "state_decrement_ratio/exp_avg_sq"
values = st.none() | st.floats(-2, 3) | st.just("NaN")


def test_edq_alone_is_not_known():
    verdict = judge({"edq_ratio": 1.0})
    assert verdict.level == "unknown"
    assert "not known" in verdict.text


def test_a_state_that_decays_is_a_second_witness():
    assert judge({"edq_ratio": 0.999, STATE: 0.98}).level == "agrees"


def test_the_oracle_is_a_second_witness():
    assert judge({"edq_ratio": 1.0, "edq_oracle_ratio": 1.01}).level == "agrees"


@pytest.mark.parametrize(
    ("metrics", "word"),
    [
        ({"edq_ratio": 0.84, STATE: 1.0, "edq_oracle_ratio": 1.0}, "updates are lost"),
        ({"edq_ratio": 1.2, STATE: 1.0}, "overshoot"),
        ({"edq_ratio": 1.0, STATE: 0.02, "edq_oracle_ratio": 1.0}, "exp_avg_sq does not decay"),
        ({"edq_ratio": 1.0, STATE: 1.0, "edq_oracle_ratio": 0.7}, "oracle disagrees"),
        ({"edq_ratio": 1.0, STATE: 1.0, "state_decrement_ratio/exp_avg": 1.6}, "decays too fast"),
    ],
)
def test_one_contradiction_is_enough(metrics, word):
    verdict = judge(metrics)
    assert verdict.level == "disagrees"
    assert word in verdict.text.lower()


def test_nothing_measured_is_not_known():
    assert judge({}).level == "unknown"
    assert judge({"edq_ratio": "NaN", STATE: 1.0}).level == "unknown"


@given(values, values, values)
def test_a_good_word_always_has_two_witnesses(edq, state, oracle):
    if judge({"edq_ratio": edq, STATE: state, "edq_oracle_ratio": oracle}).level == "agrees":
        assert abs(1 - edq) <= 0.05
        assert isinstance(state, float) or isinstance(oracle, float)
