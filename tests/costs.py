"""What each test costs in CPU seconds, of its process and of all that it starts; tests that cost much say why.

`--costs=FILE` writes one line a test; the end of every run names those above the budget that `tests/costs.toml`
does not explain. CPU time grows on a busy machine, by half at most: only what takes ten times its budget fails.
"""

import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forking import FORKED_FROM

__all__ = ["BUDGET_SECONDS", "Costs", "cpu_seconds", "explained"]

BUDGET_SECONDS = 0.5
CERTAIN = 10
"""Times the budget: more than a busy machine explains."""
AROUND = 40
"""Times the budget: so much may a test cost whose file or folder is explained."""
_LEDGER = Path(__file__).with_suffix(".toml")
_TICKS = os.sysconf("SC_CLK_TCK")
_PROPERTY = "cpu_seconds"


def cpu_seconds() -> float:
    """CPU seconds so far of this process, of all that it started and waited for, and of all that still runs.

    What the processes import that programs are forked from is left out, as collecting is: any test may come first.
    """
    return sum(map(_of_process, _family(os.getpid()))) / _TICKS


def explained() -> dict[str, str]:
    """The tests that may cost more than the budget, and why: by file and function; by file or folder what is no
    certain breach."""
    return tomllib.loads(_LEDGER.read_text()) if _LEDGER.exists() else {}


class Costs:
    """The plugin: measures in the process that runs a test, sums up where the run is reported."""

    def __init__(self, path: Path | None):
        self._path = path
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self._begun = self._most = cpu_seconds()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        # The sum falls when a process ends for which nobody waits, as a browser's do.
        self._most = max(self._most, cpu_seconds())
        if call.when == "teardown":
            item.user_properties.append((_PROPERTY, self._most - self._begun))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self._seconds[report.nodeid] = dict(report.user_properties).get(_PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        if not self._seconds:
            return
        if self._path:
            lines = (f"{seconds:.2f} {name}" for name, seconds in sorted(self._seconds.items()))
            self._path.write_text("\n".join(lines) + "\n")
        rooms: dict[str, float] = defaultdict(float)
        for name, seconds in self._seconds.items():
            rooms["/".join(name.partition("::")[0].split("/")[:2])] += seconds
        terminalreporter.section("CPU seconds")
        terminalreporter.line(
            f"{sum(rooms.values()):.0f} in all: "
            + ", ".join(
                f"{room} {seconds:.0f}"
                for room, seconds in sorted(rooms.items(), key=lambda each: -each[1])
                if seconds >= 1
            )
        )
        for name, seconds in sorted(self.unexplained().items(), key=lambda each: -each[1])[:20]:
            terminalreporter.line(f"{seconds:.1f} {name}: make it cheaper, or say why in tests/costs.toml")

    def pytest_sessionfinish(self, session, exitstatus):
        dear = [name for name, seconds in self.unexplained().items() if seconds > CERTAIN * BUDGET_SECONDS]
        if dear and exitstatus == pytest.ExitCode.OK and os.environ.get("CI"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def unexplained(self) -> dict[str, float]:
        """CPU seconds of the tests above the budget that the ledger does not know."""
        known = explained()
        return {
            name: seconds
            for name, seconds in self._seconds.items()
            if seconds > BUDGET_SECONDS and not _is_explained(name, seconds, known)
        }


def _is_explained(name: str, seconds: float, known: dict[str, str]) -> bool:
    file = Path(name.partition("::")[0])
    around = seconds <= AROUND * BUDGET_SECONDS and any(str(place) in known for place in (file, *file.parents))
    return around or name.partition("[")[0] in known


def _family(process: int) -> Iterator[int]:
    yield process
    for thread in _read(Path(f"/proc/{process}/task")):
        for child in _words(thread / "children"):
            yield from _family(int(child))


def _read(folder):
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _words(path):
    try:
        return path.read_text().split()
    except OSError:
        return []


def _of_process(process: int) -> int:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # Its own time and, from the third on, that of those it has waited for.
    return sum(map(int, fields[13 if process in FORKED_FROM else 11 : 15]))
