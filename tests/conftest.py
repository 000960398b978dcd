"""Fixtures and rules for every test."""

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.costs import Costs, explained
from tests.drawn import leave_to_the_night
from tests.side_by_side import SideBySide

# Threads that wait for each other take ten times what these small steps take.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_MEMORY = Path("/dev/shm")
_ROOMY_BYTES = 6 * 2**30
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ROOMY_BYTES:
    # What stores make durable they need not wait for: on a disk, waiting takes more than all the rest.
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

# Properties have no clock: on a busy machine a slow example is no failure. `make nightly` looks further, at random.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("nightly", settings.get_profile("steady"), derandomize=False, max_examples=2_000)
settings.load_profile("steady")


def pytest_addoption(parser):
    parser.addoption("--costs", type=Path, help="write each test's CPU seconds to this file")
    parser.addoption("--forks", type=int, default=1, help="run tests side by side in so many processes")


def pytest_configure(config):
    config.pluginmanager.register(Costs(config.getoption("costs")), "costs")
    if (forks := config.getoption("forks")) > 1:
        config.pluginmanager.register(SideBySide(config, forks), "side by side")


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory):
    """No test sees the user's folders, variables or server: a home of its own, and a port that nobody can take.

    The address that is looked at where none is given is that port's, as `up` would announce it.
    """
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for name in list(os.environ):
            if name.startswith(("COLLAGE_", "XDG_")):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        _announce(home, address)
        yield home, address


@pytest.fixture(autouse=True)
def _clean_home(_home):
    """What an earlier test left in the home is gone."""
    home, address = _home
    yield
    for folder in (home / ".local" / "share", home / ".config"):
        shutil.rmtree(folder, ignore_errors=True)
    _announce(home, address)


@pytest.fixture(autouse=True)
def _nothing_watched_is_left():
    """A watched average that nobody dropped would look at the steps of later tests; a watch that waits for a run
    would join theirs.
    """
    yield
    if (session := sys.modules.get("collage_agent.session")) is not None:
        session._SESSION.averages.end()
        session._SESSION.waiting.clear()


def _announce(home: Path, address: str) -> None:
    path = home / ".local" / "state" / "collage-monitor" / "server.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    server = {"server_url": address, "dashboard_url": address, "folder": str(home), "process_id": os.getpid()}
    path.write_text(json.dumps(server))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays; to look for garbage in it again and again takes a tenth of all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A part of each matrix is left to the night; what is dear is slow, thus later; CUDA tests may be skipped."""
    leave_to_the_night(items)
    dear = explained()
    for item in items:
        if item.nodeid.partition("[")[0] in dear:
            item.add_marker(pytest.mark.slow)
    # Most faults are told by a quick test. Then the longest modules, so that none is left at the end.
    # A module stays in one piece, and with it what its tests share.
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path in slow, -slow[item.path], item.path))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """What `make quick` runs starts no process: where a test does, it says so by the marker `slow`."""
    with pytest.MonkeyPatch.context() as patch:
        if not any(item.get_closest_marker(lane) for lane in ("slow", "nightly", "gpu")):
            patch.setattr(subprocess.Popen, "_execute_child", _refused)
            patch.setattr(os, "fork", _refused)
        return (yield)


def _refused(*_, **__):
    raise AssertionError("a test that starts a process is marked slow")
