"""What the tests stand on: costs, samples of matrices, ports, programs that are forked, and files side by side."""

import os
import re
from itertools import combinations, product

import pytest

from tests import costs, ports
from tests.drawn import sample
from tests.forking import FORKED_FROM, TORCH, TRAINING, Program, run_forked

LEDGER = {"tests/a/test_one.py::test_dear": "why", "tests/a": "why", "tests/b/test_two.py": "why"}


@pytest.mark.parametrize(
    ("name", "seconds", "told"),
    [
        ("tests/c/test_three.py::test", 0.5, False),
        ("tests/c/test_three.py::test", 0.6, True),
        ("tests/a/test_one.py::test_dear[7]", 9.0, False),
        ("tests/a/test_one.py::test_other", 20.0, False),
        ("tests/a/test_one.py::test_other", 20.1, True),
        ("tests/b/test_two.py::Class::test[1]", 1.0, False),
        ("tests/b/test_twofold.py::test", 1.0, True),
    ],
)
def test_what_costs_much_is_named_unless_it_is_explained(monkeypatch, name, seconds, told):
    monkeypatch.setattr(costs, "explained", lambda: LEDGER)
    found = costs.Costs(None)
    found._seconds = {name: seconds}
    assert (name in found.unexplained()) is told


def test_what_is_explained_is_there():
    folder = costs._LEDGER.parents[1]
    assert [name for name in costs.explained() if not (folder / name.partition("::")[0]).exists()] == []


CELLS = [*product("abcd", (1, 2, 3), (False, True))]


@pytest.mark.parametrize(("pairs", "most"), [(False, 5), (True, 15)])
def test_every_value_or_every_pair_of_them_comes_up_in_few_cells(pairs, most):
    drawn = sample(CELLS, "a test", pairs=pairs)
    for axes in combinations(range(3), 2 if pairs else 1):
        seen = {tuple(CELLS[place][axis] for axis in axes) for place in drawn}
        assert seen == {tuple(cell[axis] for axis in axes) for cell in CELLS}
    assert len(drawn) <= most < len(CELLS)
    assert drawn == sample(CELLS, "a test", pairs=pairs)
    assert drawn != sample(CELLS, "another", pairs=pairs)


def test_a_port_that_one_session_was_given_no_other_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_PORTS", range(20_000, 20_016))
    one, other = (ports._free_ports.__wrapped__() for _ in range(2))
    given = [next(session, None) for _ in range(8) for session in (one, other)]
    given = [port for port in given if port is not None]
    assert len(given) > 8
    assert len(set(given)) == len(given)


BEYOND_PID_MAX = 2**22 + 1
"""The id of no process, as that of one that has just ended."""


def test_a_signal_to_one_that_has_ended_before_its_status_came_is_nothing():
    read, write = os.pipe()
    with os.fdopen(write, "w") as status:
        status.write(f"{BEYOND_PID_MAX}\n")
        status.flush()
        program = Program(os.fdopen(read), None, None)
        program.kill()
        assert program.poll() is None
        status.write("0\n")
    assert program.wait() == 0


@pytest.mark.slow
def test_what_one_imports_beyond_another_the_other_has_not():
    """Though the former is forked from the latter, which imports what both do once."""
    code = "import sys; print(*(name in sys.modules for name in ('torch', 'collage_optim')))"
    more = run_forked(TRAINING, "-c", code)
    few = run_forked(TORCH, "-c", code)
    assert (more.stdout, few.stdout) == ("True True\n", "True False\n")
    assert len(FORKED_FROM) >= 2


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


@pytest.mark.slow
def test_all_are_run_once_what_a_file_shares_is_made_once_and_what_is_red_is_told(tmp_path):
    noted = tmp_path / "noted"
    green = GREEN.replace("NOTED", repr(str(noted)))
    status, output = ran(tmp_path, {"a": green, "b": green, "c": green, "red": RED})
    assert status == 1
    assert "1 failed, 6 passed" in output
    assert re.search(r"assert 1 == 2(.|\n)*a word", output)
    assert sorted(noted.read_text().split()) == ["test_a", "test_b", "test_c"]


@pytest.mark.slow
def test_a_fork_that_dies_fails_the_test_that_it_ran_and_what_it_left_is_told(tmp_path):
    dies = "import os\ndef test_dies(): os._exit(7)\ndef test_after(): pass\n"
    status, output = ran(tmp_path, {"dies": dies, "green": "def test_green(): pass\n"})
    assert status == 1
    assert re.search(r"FAILED test_dies.py::test_dies - its process ended: 7", output)
    assert "2 tests were not run" in output
