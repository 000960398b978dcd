"""No test waits for a time or judges one, of a clock or of a CPU: a busy machine would fail it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALL = {"sleep", "monotonic", "perf_counter"}
CPU = {"thread_time", "process_time", "clock_gettime", "pthread_getcpuclockid"}
CLOCKS = WALL | CPU | {f"{name}_ns" for name in WALL | CPU}
EXEMPT = {
    "drills/cluster": "its pieces are killed at random moments, and its log says how long acknowledgements paused",
    "drills/containers/__main__.py": "says what each stage took",
    "drills/mutants/session.py": "ends tests that a planted fault keeps from ending, and says what each took",
    "tests/waiting.py": "the one place that waits",
    "tests/alerts/test_prometheus.py": "logs how soon a person sees an alert; no limit is asked of a busy machine",
    "tests/agent_delivery/doubles.py": "notes when a request came; a test asks that enough time lies between",
    "tests/alerts/study.py": "says what a run of the study took",
    "tests/numerics/exhaustive.py": "says what the lane took",
    "drills/torture": "servers are killed at random moments, and its log says how long a lane took",
}


def clocks_in(source):
    """Lines that read a clock of `time` or sleep; a module of that name alone is no clock of `asyncio`."""
    if not any(name in source for name in (*CLOCKS, "wait_for_timeout", "from time import")):
        return []
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute | ast.ImportFrom)]
    return [node.lineno for node in nodes if is_a_clock(node)]


def is_a_clock(node):
    if isinstance(node, ast.ImportFrom):
        return node.module == "time"
    of_time = node.attr in CLOCKS and ast.unparse(node.value) in {"time", "asyncio"}
    return of_time or node.attr == "wait_for_timeout"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.sleep(1)", [2]),
        ("await asyncio.sleep(0.05)", [1]),
        ("from time import sleep", [1]),
        ("page.wait_for_timeout(4000)", [1]),
        ("began = time.monotonic()", [1]),
        ("began = time.thread_time()", [1]),
        ("time.clock_gettime(clock)", [1]),
        ("now = time.time()", []),
        ("monkeypatch.setattr('time.sleep', sleep)", []),
    ],
)
def test_a_clock_is_seen(source, found):
    assert clocks_in(source) == found


@pytest.mark.slow
def test_tests_wait_for_conditions():
    exempt = {ROOT / name for name in EXEMPT}
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in ("tests", "drills")
        for path in (ROOT / folder).rglob("*.py")
        if exempt.isdisjoint({path, *path.parents}) and (lines := clocks_in(path.read_text()))
    }
    assert found == {}
