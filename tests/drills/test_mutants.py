"""The kept faults fit the code: a change that moves a fault's text, or its tests, says so at once.

`make mutants` plants them, and says which the tests catch.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drills.mutants import __main__ as lane
from drills.mutants import faults
from drills.mutants.faults import ROOMS, faults_of

TABLE = """
tests = ["tests/drills/test_mutants.py"]

[[fault]]
name = "one"
file = "drills/mutants/__init__.py"
before = "BEFORE"
after = "AFTER"
kind = "second operand"
"""
TEXT = "planted one at a time"


@pytest.mark.parametrize("room", ROOMS)
def test_each_fault_is_one_change_of_one_place_with_tests_that_exist(room):
    assert faults_of(room)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("BEFORE", "no such text"), "stands 0 times"),
        (("BEFORE", "e"), "times in drills/mutants"),
        (("AFTER", TEXT), "'planted one at a time'"),
        (
            ("tests/drills/test_mutants.py", "tests/drills/test_none.py::Test"),
            "there is no tests/drills/test_none.py",
        ),
        (("kind", "sort"), "'sort' is no field"),
        (("AFTER", "other"), "one name"),
    ],
)
def test_a_fault_that_does_not_fit_is_refused(tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(faults, "_TABLES", tmp_path)
    table = TABLE.replace(*change).replace("BEFORE", TEXT)
    (tmp_path / "room.toml").write_text(table + table.partition("\n\n")[2] * (words == "one name"))
    with pytest.raises(ValueError, match=words):
        faults_of("room")


MODULE = """
from functools import cache
OTHER = 2

@cache
def edge(x):
    return x < 1

class Kind:
    @property
    def own(self):
        return [value for value in (1, 2) if value < 2]

CHOSEN = lambda x: x < 3
"""
TESTS = """
from module import OTHER, Kind, edge

def test_edge():
    assert not edge(1)

def test_other():
    assert OTHER == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("red", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_room_is_as_good_as_its_tests(tmp_path, red):
    """A fault that a test sees, one of a constant, one that nobody sees; and tests that are red without one."""
    source = Path(lane.__file__).parent
    shutil.copytree(source, tmp_path / "drills" / "mutants", ignore=shutil.ignore_patterns("*.toml", "__pycache__"))
    (tmp_path / "drills" / "__init__.py").touch()
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS + "\ndef test_red():\n    assert False\n" if red else TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: -\n    nightly: -\n")
    entries = [("edge", "x < 1", "x <= 1"), ("constant", "OTHER = 2", "OTHER = 3"), ("unseen", "< 2]", "< 3]")]
    faults = tmp_path / "drills" / "mutants" / "faults"
    faults.mkdir(exist_ok=True)
    tables = [
        f'[[fault]]\nname = "{name}"\nbefore = "{before}"\nafter = "{after}"\nfile = "module.py"\nkind = ""\n'
        for name, before, after in entries
    ]
    (faults / "room.toml").write_text("".join(['tests = ["test_module.py"]\n', *tables]))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "drills.mutants.session", "room"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    if red:
        assert "room: red without a fault: test_module.py::test_red" in run.stdout
        return
    assert "room edge: caught by test_module.py::test_edge," in run.stdout
    assert "room constant: caught by test_module.py::test_other," in run.stdout
    assert "room unseen: SURVIVED" in run.stdout
    assert "room: 2 of 3 caught (67%)" in run.stdout
    assert (tmp_path / "module.py").read_text() == MODULE
