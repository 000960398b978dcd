"""The tests of one room, collected once; for each of its faults a fork of that process runs its part of them.

In the fork the functions that the fault changes get their new code, wherever they are referred to. What only
imports would change, such as a constant, is left to a new process. So is the last word on a fault that survives.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest import main as pytest_main

from drills.mutants.faults import Fault, faults_of, planted

_LEAST_SHARE = 0.92
_MOST_SECONDS = 900.0
"""Tests of one fault that take longer hang, and are red, too."""
_BROKEN = 9
"""Status of a fork in which the tests themselves could not be run."""
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not nightly and not gpu")


def main(room: str, *names: str) -> int:
    """1 if fewer faults than should be are caught, or the tests are red without one."""
    faults = [fault for fault in faults_of(room) if not names or fault.name in names]
    if not faults:
        return 0
    told = os.dup(1)
    with tempfile.TemporaryFile() as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        lane = Lane(room, faults, Path.cwd(), lambda line: os.write(told, f"{line}\n".encode()))
        tests = dict.fromkeys(test for fault in faults for test in fault.tests)
        status = pytest.main([*tests, *_OPTIONS], plugins=[lane])
        if not lane.green:
            output.seek(0)
            os.write(told, f"{room}: pytest ended with {int(status)}\n".encode() + output.read()[-4000:])
            return 1
    return int(lane.share < _LEAST_SHARE)


class Lane:
    """A plugin of pytest: in place of the collected tests it runs those of each fault, each in a fork."""

    def __init__(self, room: str, faults: Sequence[Fault], tree: Path, tell: Callable[[str], object]) -> None:
        self._room, self._faults, self._tree, self._tell = room, faults, tree, tell
        self._red = Path()
        self.share = 0.0
        self.green = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Quick tests first: most faults are caught by one of them."""
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In a fork: note the test that is red."""
        if report.failed:
            self._red.write_text(report.nodeid, encoding="utf-8")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Look at each fault; what caught them must be green without one. Survivors are named at the end."""
        if session.testsfailed:
            return True
        caught = {fault.name: red for fault in self._faults if (red := self._caught_by(session, fault)) is not None}
        without, always = self._status(session, _chosen(session, caught.values()), lambda: None)
        if without:
            self._tell(f"{self._room}: red without a fault: {always}")
            return True
        survived = [fault for fault in self._faults if fault.name not in caught]
        self.share = len(caught) / len(self._faults)
        self._tell(f"{self._room}: {len(caught)} of {len(self._faults)} caught ({self.share:.0%})")
        for fault in survived:
            self._tell(f"  {fault.name} ({fault.kind}): {fault.file}: {fault.before!r} -> {fault.after!r}")
        self.green = True
        return True

    def _caught_by(self, session: pytest.Session, fault: Fault) -> str | None:
        """The test that is red with the fault, "" if none ended; None if all are green, or cannot be collected."""
        began, file = time.monotonic(), self._tree / fault.file
        before = file.read_text(encoding="utf-8")
        with planted(fault, self._tree):
            changed = changed_functions(before, file.read_text(encoding="utf-8"), file)
            status, red = 0, ""
            if changed is not None:
                status, red = self._status(session, _chosen(session, fault.tests), lambda: give_code(changed))
            if status == 0:
                status, red = self._status_anew(fault.tests)
        word = {0: "SURVIVED", 1: f"caught by {red}"}.get(
            status, "caught, hung" if status < 0 else f"void ({status}) {red}"
        )
        self._tell(f"{self._room} {fault.name}: {word}, {time.monotonic() - began:.0f} s")
        return red if status < 0 or status == 1 else None

    def _status(
        self, session: pytest.Session, items: list[pytest.Item], plant: Callable[[], None]
    ) -> tuple[int, str]:
        """0 if these tests are green in a fork, 1 and the first that is red, below 0 if they hang or die."""
        with tempfile.TemporaryDirectory(prefix="mutants-run-") as folder:
            self._red = Path(folder, "red")
            self._red.touch()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                os._exit(_run(session, items, plant, folder))
            end = time.monotonic() + _MOST_SECONDS
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
                time.sleep(0.02)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if ended[0] == 0:
                os.waitpid(pid, 0)
                return -1, ""
            return os.waitstatus_to_exitcode(ended[1]), self._red.read_text(encoding="utf-8")

    def _status_anew(self, tests: Sequence[str]) -> tuple[int, str]:
        """pytest's exit status in a new process, and the first test that is red; -1 if it had to be ended."""
        command = [sys.executable, "-m", "pytest", *tests, *_OPTIONS]
        try:
            run = subprocess.run(command, cwd=self._tree, timeout=_MOST_SECONDS, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return -1, ""
        red = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
        return run.returncode, red.group(1) if red else ""


def _chosen(session: pytest.Session, tests: Iterable[str]) -> list[pytest.Item]:
    prefixes = tuple(filter(None, tests))
    return [item for item in session.items if prefixes and item.nodeid.startswith(prefixes)]


def _run(session: pytest.Session, items: list[pytest.Item], plant: Callable[[], None], folder: str) -> int:
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # What the parent registered would take its folders away.
    atexit._clear()
    # The smallest example that is red is of no use here, and takes minutes to find.
    engine: Any = importlib.import_module("hypothesis.internal.conjecture.engine")
    engine.MAX_SHRINKS, engine.MAX_SHRINKING_SECONDS = 0, 0
    try:
        plant()
        session.items = items
        with suppress(session.Failed):
            pytest_main.pytest_runtestloop(session)
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
        return int(session.testsfailed > 0)
    except BaseException:
        Path(folder, "red").write_text(traceback.format_exc(), encoding="utf-8")
        return _BROKEN


def changed_functions(before: str, after: str, file: Path) -> dict[str, types.CodeType] | None:
    """The new code of a module's functions by their qualified names; None if more than functions changed."""
    old, new = (dict(_codes(compile(text, str(file), "exec", dont_inherit=True))) for text in (before, after))
    if old.keys() != new.keys():
        return None
    changed = {
        name: code for name, code in new.items() if _content(code, deep=True) != _content(old[name], deep=True)
    }
    outer = {name for name, code in new.items() if not code.co_flags & 0x02}
    if any(_content(new[name]) != _content(old[name]) for name in outer) or any(
        "<" in name for name in changed.keys() - outer
    ):
        return None
    return {name: code for name, code in changed.items() if name not in outer}


def give_code(codes: dict[str, types.CodeType]) -> None:
    """Give every function of these names and their file its new code, whoever refers to it."""
    gc.unfreeze()
    files = {code.co_filename for code in codes.values()}
    for found in gc.get_objects():
        if type(found) is types.FunctionType and found.__code__.co_filename in files:
            found.__code__ = codes.get(found.__qualname__, found.__code__)


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    """A module, its classes, and the functions of both; what stands within a function belongs to it."""
    yield code.co_qualname, code
    if code.co_flags & 0x02:
        return
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _content(code: types.CodeType, *, deep: bool = False) -> tuple[Any, ...]:
    """What a piece of code does, wherever it stands; `deep`: with what stands within it."""
    constants = tuple(
        (_content(own, deep=True) if deep else None) if isinstance(own, types.CodeType) else repr(own)
        for own in code.co_consts
    )
    return code.co_code, code.co_names, constants


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
