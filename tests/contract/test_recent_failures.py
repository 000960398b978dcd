"""Failures are counted within the last seconds, however steadily they come."""

import pytest

from collage_monitor import recent_failures
from collage_monitor.recent_failures import RecentFailures


class Elapsed:
    """Seconds that move only when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def elapsed(monkeypatch):
    clock = Elapsed()
    monkeypatch.setattr(recent_failures, "monotonic", clock)
    return clock


def test_a_failure_each_50_seconds_never_adds_up(elapsed):
    failures = RecentFailures(60.0, 10)
    for _ in range(30):
        failures.add("a")
        assert failures.count("a") <= 2
        elapsed.now += 50.0


def test_each_address_is_counted_until_its_failures_are_old(elapsed):
    failures = RecentFailures(60.0, 10)
    for _ in range(3):
        failures.add("a")
    failures.add(None)
    assert (failures.count("a"), failures.count(None), failures.count("b")) == (3, 1, 0)
    elapsed.now = 60.0
    assert failures.count("a") == 0


def test_the_address_that_failed_longest_ago_is_forgotten_first(elapsed):
    failures = RecentFailures(60.0, 2)
    for address in ("a", "b", "a", "c"):
        failures.add(address)
    assert [failures.count(address) for address in ("a", "b", "c")] == [2, 0, 1]
