"""Files of tests that run in forks: each is run once and told of, and none is lost."""

import os
import re

import pytest

from tests.forking import run_forked

pytestmark = pytest.mark.slow

PLUGIN = """
from tests.side_by_side import SideBySide

def pytest_configure(config):
    config.pluginmanager.register(SideBySide(config, 2), "side by side")
"""
GREEN = """
import sys
import pytest

def tell(word, file=sys.stderr):
    print(word, file=file)

@pytest.fixture(scope="module")
def shared():
    with open(NOTED, "a") as file:
        print(__name__, file=file)

def test_one(shared, capfd):
    print("out", flush=True)
    assert capfd.readouterr().out == "out\\n"

def test_two(shared, tmp_path):
    tell("to the stream of the collection")
    assert not list(tmp_path.iterdir())
"""
RED = """
def test_red():
    print("a word")
    assert 1 == 2
"""


def ran(folder, codes, *options):
    """(status, output) of files with these codes."""
    (folder / "conftest.py").write_text(PLUGIN)
    for name, code in codes.items():
        (folder / f"test_{name}.py").write_text(code)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = ("-m", "pytest", "-p", "no:cacheprovider", *options, folder)
    done = run_forked(("pytest",), *command, folder=folder, environment=environment)
    return done.returncode, done.stdout


def test_all_are_run_once_what_a_file_shares_is_made_once_and_what_is_red_is_told(tmp_path):
    noted = tmp_path / "noted"
    green = GREEN.replace("NOTED", repr(str(noted)))
    status, output = ran(tmp_path, {"a": green, "b": green, "c": green, "red": RED})
    assert status == 1
    assert "1 failed, 6 passed" in output
    assert re.search(r"assert 1 == 2(.|\n)*a word", output)
    assert sorted(noted.read_text().split()) == ["test_a", "test_b", "test_c"]


def test_a_fork_that_dies_fails_the_test_that_it_ran_and_what_it_left_is_told(tmp_path):
    dies = "import os\ndef test_dies(): os._exit(7)\ndef test_after(): pass\n"
    status, output = ran(tmp_path, {"dies": dies, "green": "def test_green(): pass\n"})
    assert status == 1
    assert re.search(r"FAILED test_dies.py::test_dies - its process ended: 7", output)
    assert "2 tests were not run" in output


def test_the_first_red_test_stops_all(tmp_path):
    status, output = ran(tmp_path, {"a": RED, "b": RED}, "-x")
    assert status == 1
    assert "stopping after 1 failures" in output
