"""What the wheel carries is typed: a user's strict script finds the types of every package."""

import shutil
import sys
import tomllib
import venv

import pytest

from tools.release import ROOT, untyped

BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
PACKAGES = BUILD["targets"]["wheel"]["packages"]


def test_each_package_of_the_wheel_says_that_it_is_typed():
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []


@pytest.mark.slow
def test_a_strict_script_passes_against_what_the_wheel_installs(tmp_path):
    """Installed as the wheel is: the packages it lists, side by side, before what this environment has."""
    venv.create(tmp_path / "own")
    installed = next((tmp_path / "own").glob("lib/python*/site-packages"))
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, installed / (ROOT / package).name, ignore=shutil.ignore_patterns("__pycache__")
        )
    others = [path for path in sys.path if path.endswith("site-packages")]
    (installed / "others.pth").write_text("\n".join(others))
    assert untyped(tmp_path / "own" / "bin", tmp_path) == ""
