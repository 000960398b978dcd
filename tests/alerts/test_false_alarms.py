"""Healthy trainings wake nobody, sick ones the right alert, in the nightly lane; by day one training in
`test_both_evaluations`."""

import pytest
import torch

from collage_monitor.alerts import ALERTS
from tests.alerts.study import done, healthy_cases, sick_cases
from tests.alerts.trainings import SICK

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loud(fired):
    return [entry for entry in fired if entry[1] != "info"]


def check(kind, seed):
    fired = done(kind, seed)["fired"]
    if kind in SICK:
        assert SICK[kind][0] in {name for name, _, _ in fired}, fired
    else:
        assert loud(fired) == []
    return [name for name, _, _ in fired]


@pytest.mark.nightly
def test_what_plain_bf16_loses_at_a_good_edq_wakes_by_default():
    fired = check("plain bf16 at a high rate", seed=1)
    assert [name for name in fired if ALERTS[name].on_by_default] == ["CollageUpdatesLost"]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "seed"), [*sick_cases(5), *healthy_cases(300)])
def test_all_of_them(kind, seed):
    check(kind, seed)
