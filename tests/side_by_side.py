"""Tests side by side: collected once, then run by forks of this process, a file at a time. `--forks 3`.

A fork runs a file whole, for what its tests share is made once, and takes the next that no fork has.
"""

import atexit
import os
import signal
import traceback
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

__all__ = ["SideBySide"]

_NUMBER_BYTES = 4


class SideBySide:
    """The plugin: in the process that collects it reports; in a fork it runs tests and tells of them."""

    def __init__(self, config: Any, forks: int) -> None:
        self._config, self._forks = config, forks
        self._channel: Connection | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool | None:
        """Raises Failed where tests are to stop, as pytest's own loop does, and where some were not run."""
        if session.testsfailed or self._config.option.collectonly:
            return None
        # A line of output is of several files.
        self._config.pluginmanager.get_plugin("terminalreporter").showfspath = False
        folder = self._config._tmp_path_factory.getbasetemp()
        files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
        queue, filled = os.pipe()
        os.write(filled, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(len(files))))
        os.close(filled)
        running: dict[Any, int] = {}
        try:
            for number in range(self._forks):
                channel, self._channel = Pipe(duplex=False)
                if (pid := os.fork()) == 0:
                    os._exit(self._run(session, files, queue, folder / f"fork{number}"))
                self._channel.close()
                running[channel] = pid
            self._channel = None
            ended = self._report(session, running)
        finally:
            os.close(queue)
            for pid in running.values():
                os.kill(pid, signal.SIGINT)
            for pid in running.values():
                os.waitpid(pid, 0)
        if ended < len(session.items):
            session.shouldfail = f"{len(session.items) - ended} tests were not run"
            raise session.Failed(session.shouldfail)
        return True

    def _report(self, session: Any, running: dict[Any, int]) -> int:
        """How many tests have ended, once all forks have; those leave the dict."""
        hook, ended = self._config.hook, 0
        begun: dict[Any, tuple[str, tuple[str, int | None, str]]] = {}
        while running:
            channel: Any
            for channel in wait(list(running)):
                try:
                    word = channel.recv()
                except EOFError:
                    status = os.waitstatus_to_exitcode(os.waitpid(running.pop(channel), 0)[1])
                    if channel not in begun:
                        continue
                    name, place = begun.pop(channel)
                    report = pytest.TestReport(name, place, {}, "failed", f"its process ended: {status}", "call")
                else:
                    if isinstance(word, tuple):
                        begun[channel] = word
                        continue
                    report = hook.pytest_report_from_serializable(config=self._config, data=word)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    del begun[channel]
                    ended += 1
                    hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
                if stop := session.shouldfail or session.shouldstop:
                    raise session.Failed(stop)
        return ended

    def _run(self, session: Any, files: list[list[pytest.Item]], queue: int, folder: Path) -> int:
        """In a fork: the tests of the files that it gets. Returns the status to end with."""
        # What ends with the process that collected is not this one's to end, and it writes apart from the others.
        atexit._clear()
        folder.mkdir()
        self._config._tmp_path_factory._basetemp = folder
        self._config.get_terminal_writer()._file = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        # What was imported may hold the streams of the collection, as defaults: they are left, and not closed.
        self._left, capture._global_capturing = capture._global_capturing, None
        capture.start_global_capturing()
        capture.suspend_global_capture()
        numbers = (int.from_bytes(number) for number in iter(lambda: os.read(queue, _NUMBER_BYTES), b""))
        items = (item for number in numbers for item in files[number])
        try:
            item = next(items, None)
            while item is not None:
                following = next(items, None)
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                item = following
        except BaseException:  # An interrupt, too: what tests have started must end.
            traceback.print_exc()
            return 1
        finally:
            with suppress(Exception):
                session._setupstate.teardown_exact(None)
            atexit._run_exitfuncs()
        return 0

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """In a fork: tell which test begins."""
        if self._channel:
            self._channel.send((nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In a fork: tell how a part of a test went."""
        if self._channel:
            hook = self._config.hook
            self._channel.send(hook.pytest_report_to_serializable(config=self._config, report=report))
