"""A short load that must be shed: refusals say when to come back, and nothing acknowledged is lost."""

from __future__ import annotations

import sqlite3

import pytest

from benchmarks.load import Load, run_load, stored

pytestmark = pytest.mark.slow


def test_what_is_shed_is_refused_and_what_is_acknowledged_is_kept_and_what_is_missing_is_found(tmp_path):
    outcome = run_load(Load(seconds=1.0, agents=16, rate=300.0), tmp_path, in_flight_bytes=2**20)
    statuses = outcome.tally.statuses
    assert set(statuses) == {200, 503}
    assert outcome.tally.without_retry_after == 0
    assert sum(outcome.tally.acknowledged.values()) > 0
    assert (outcome.missing, outcome.unexpected) == (0, 0)
    path = tmp_path / "collage.sqlite"
    before, _ = stored(path)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM report WHERE stream_id = 'run-0-1' AND seq = 3")
    connection.close()
    after, _ = stored(path)
    assert before["run-0-1"] - after["run-0-1"] == {3}
    assert before["run-0-0"] == after["run-0-0"]
