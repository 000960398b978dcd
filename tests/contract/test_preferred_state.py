"""The state decrement that stands for a run: one choice for every page, gauge and table."""

import pytest
from collage_dashboard.descriptions import state_key

from collage_monitor.metrics import preferred_state

NAME = "state_decrement_ratio"


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        (["exp_avg", "exp_avg_sq"], "exp_avg_sq"),
        (["square_avg", "grad_avg"], "grad_avg"),
        (["grad_avg", "square_avg"], "grad_avg"),
    ],
)
def test_it_is_that_of_exp_avg_sq_or_the_first_by_name(states, chosen):
    keys = ["edq_ratio", *(f"{NAME}/{state}" for state in states)]
    assert preferred_state(keys) == state_key(keys) == f"{NAME}/{chosen}"


def test_without_any_there_is_none():
    assert preferred_state(["edq_ratio", NAME]) is None
