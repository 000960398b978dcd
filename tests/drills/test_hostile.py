"""Honest senders beside every hostile one at once, in short; by day `tests/server` has each kind alone."""

import pytest

from drills.torture.hostile import run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_hostile_senders_cost_nobody_a_report_and_no_memory(tmp_path):
    seen, lost = run(20.0, 5, tmp_path)
    assert lost == 0
    assert sum(seen.tally.acknowledged.values()) > 0
    assert set(seen.tally.statuses) <= {200, 429, 503}
    assert seen.health, "/healthz was answered"
    assert max(seen.memory) <= 400 * 2**20
