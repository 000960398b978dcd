"""Windows, counterfactuals, decay, residuals and zero states do not depend on how a model is spread either."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import bursts
from tests.parallel.launch import asked, launch
from tests.parallel.merged import assert_equal_totals, merged_layers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone():
    return bursts.alone()


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return launch("bursts.spread", 2, tmp_path_factory.mktemp("bursts"), ASKED=asked(request, "case"))


@pytest.mark.drawn(by=lambda case: bursts.CASES[case])
@pytest.mark.parametrize("case", bursts.CASES)
def test_what_takes_several_steps_adds_up_over_the_ranks(case, ranks, alone):
    assert_equal_totals([rank[case] for rank in ranks], alone[bursts.CASES[case][1:]], bursts.STEPS)


@pytest.mark.parametrize("name", bursts.MAKERS)
def test_the_runs_hold_something_of_each_kind(name, alone):
    seen = [merged_layers([alone[name, torch.bfloat16]], index) for index in range(bursts.STEPS)]
    window = {key for values in seen[96 - bursts.FIRST_STEP].values() for key, value in values.items() if value > 0}
    last = {key for values in seen[-1].values() for key, value in values.items() if value > 0}
    assert {"window_active/4", "window_lost_visible/4", "window_intended_visible_sum/4"} <= window
    assert {"counterfactual_squared_sum", "decay_squared_sum", "state_zero/exp_avg_sq"} <= last
    if name == "plus":
        assert {"residual_fill_sum", "residual_fill_histogram/-3"} <= last
