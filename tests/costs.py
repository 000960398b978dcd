"""What tests cost in CPU seconds, by test function, as `make costs` recorded it: `make quick` runs the cheapest.

A test that is not in the record is new, or too cheap to tell: it is run.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

__all__ = ["CostRecorder", "is_costly"]

RECORD = Path(__file__).with_name("costs.json")
QUICK_CPU_SECONDS = 60.0
"""Of all tests that `make quick` runs, beside collecting them: half of it on each of two cores."""
_LEAST_SECONDS = 0.1
_THE_REST = ""


def is_costly(item):
    """Whether a test belongs to those that `make quick` has no time for."""
    return _function_of(item.nodeid) in _costly_functions(RECORD)


@cache
def _costly_functions(record):
    """All but the functions whose single tests are the cheapest, as far as `QUICK_CPU_SECONDS` reaches."""
    costs = json.loads(record.read_text())
    _, used = costs.pop(_THE_REST, (0, 0.0))
    costly = set()
    for name, (_, seconds) in sorted(costs.items(), key=lambda entry: entry[1][1] / entry[1][0]):
        used += seconds
        if used > QUICK_CPU_SECONDS:
            costly.add(name)
    return costly


def _function_of(nodeid):
    return nodeid.partition("[")[0]


class CostRecorder:
    """A plugin that replaces the record. Workers measure; the process beside them adds up what they report."""

    def __init__(self):
        self._tests = defaultdict(set)
        self._seconds = defaultdict(float)
        self._since = 0.0

    def pytest_runtest_logstart(self):
        self._since = time.process_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = time.process_time()
        report.cpu_seconds, self._since = now - self._since, now
        return report

    def pytest_runtest_logreport(self, report):
        name = _function_of(report.nodeid)
        self._tests[name].add(report.nodeid)
        self._seconds[name] += getattr(report, "cpu_seconds", 0.0)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            return
        record = {}
        rest = [0, 0.0]
        for name, tests in sorted(self._tests.items()):
            seconds = self._seconds[name]
            if seconds >= _LEAST_SECONDS:
                record[name] = [len(tests), round(seconds, 2)]
            else:
                rest = [rest[0] + len(tests), rest[1] + seconds]
        record[_THE_REST] = [rest[0], round(rest[1], 2)]
        lines = (f"{json.dumps(name)}: {json.dumps(cost)}" for name, cost in record.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
