"""Windows, counterfactuals, decay, residuals and zero states do not depend on how a model is spread either."""

import pytest
import torch

from tests.parallel.launch import among_asked, asked, launch
from tests.parallel.measuring import assert_equal_totals, measured, merged_layers
from tests.parallel.models import SPREAD, Part, adamw, injected, ours

pytestmark = pytest.mark.slow

FIRST_STEP = 92
"""States exist after the first step; a window of four ends at step 96; the last, 100, has counterfactuals."""
STEPS = 9
WINDOW = 4
FAINT = 2.0**-75
"""So small a gradient that its second moment is zero in bfloat16."""
MAKERS = {"adamw": adamw, "plus": ours}
WAYS = ("ddp", "fsdp1 original", "fsdp1 flat", "fsdp2")
CASES = {
    f"{way} {name} {dtype}": (way, name, dtype)
    for way in WAYS
    for name in MAKERS
    for dtype in (torch.bfloat16, torch.float32)
    if name == "adamw" or dtype == torch.bfloat16
}


class Faint(Part):
    """A part whose loss, and with it its gradients, is faint."""

    def forward(self, step):
        return super().forward(step) * FAINT


def partly_faint(dtype):
    model = injected(dtype)
    model.parts[3] = Faint(3).to(dtype)
    return model


def _measured(model, optimizer):
    return measured(model, optimizer, windows=(WINDOW,), first_step=FIRST_STEP, steps=STEPS)


def spread(folder):
    """What this rank saw in each case that was asked for."""
    return {
        case: _measured(*SPREAD[way](dtype, partly_faint(dtype), MAKERS[name]))
        for case, (way, name, dtype) in among_asked(CASES).items()
    }


@pytest.fixture(scope="module")
def alone():
    """{(optimizer, dtype): what one process saw}."""
    found = {}
    for name, dtype in {case[1:] for case in CASES.values()}:
        model = partly_faint(dtype)
        found[name, dtype] = _measured(model, MAKERS[name](model.parameters()))
    return found


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return launch("test_bursts.spread", 2, tmp_path_factory.mktemp("bursts"), ASKED=asked(request, "case"))


@pytest.mark.drawn(by=lambda case: CASES[case])
@pytest.mark.parametrize("case", CASES)
def test_what_takes_several_steps_adds_up_over_the_ranks(case, ranks, alone):
    assert_equal_totals([rank[case] for rank in ranks], alone[CASES[case][1:]], STEPS)


@pytest.mark.parametrize("name", MAKERS)
def test_the_runs_hold_something_of_each_kind(name, alone):
    seen = [merged_layers([alone[name, torch.bfloat16]], index) for index in range(STEPS)]
    window = {key for values in seen[96 - FIRST_STEP].values() for key, value in values.items() if value > 0}
    last = {key for values in seen[-1].values() for key, value in values.items() if value > 0}
    assert {"window_active/4", "window_lost_visible/4", "window_intended_visible_sum/4"} <= window
    assert {"counterfactual_squared_sum", "decay_squared_sum", "state_zero/exp_avg_sq"} <= last
    if name == "plus":
        assert {"residual_fill_sum", "residual_fill_histogram/-3"} <= last
