"""Failures are counted within the last seconds, however steadily they come."""

from types import SimpleNamespace

import pytest

from collage_monitor import recent_failures
from collage_monitor.recent_failures import RecentFailures


@pytest.fixture
def elapsed(monkeypatch):
    """Seconds that move only when told."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(recent_failures, "monotonic", lambda: clock.now)
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
