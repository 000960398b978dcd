"""What the three wheels carry is typed, and the optimizers need nothing else of ours."""

import re
import shutil
import sys
import tomllib
import venv

import pytest

from tests.forking import TORCH, run_forked
from tools.release import DISTRIBUTIONS, MISTYPED, OPTIMIZING, OURS, ROOT, TYPED, untyped


def _packages(folder):
    """The import packages that a distribution carries, as folders."""
    build = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    found = [ROOT / folder / package for package in build["targets"]["wheel"]["packages"]]
    # server/hatch_build.py adds it.
    return [*found, ROOT / "dashboard" / "collage_dashboard"] if folder == "server" else found


PACKAGES = [package for folder in DISTRIBUTIONS.values() for package in _packages(folder)]


def test_each_package_is_in_one_wheel_and_says_that_it_is_typed():
    assert sorted(package.name for package in PACKAGES) == sorted(OURS)
    assert [package for package in PACKAGES if not (package / "py.typed").is_file()] == []


@pytest.mark.slow
def test_the_optimizers_work_where_nothing_else_of_ours_is():
    """A training with them, and what their page shows; contract and agent cannot be imported there."""
    (page,) = re.findall(r"```python\n(.*?)```", (ROOT / "agent" / "README.md").read_text(), re.DOTALL)
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in OURS if name != "collage_optim")
    code = f"import sys\n{blocked}{OPTIMIZING}{page}"
    done = run_forked(TORCH, "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.float64 ['coupled-7'"), done.stdout


@pytest.mark.nightly
def test_strict_scripts_pass_against_what_the_wheels_install(tmp_path):
    """Installed as the wheels are: their packages, side by side, before what this environment has."""
    venv.create(tmp_path / "own")
    programs = tmp_path / "own" / "bin"
    installed = next((tmp_path / "own").glob("lib/python*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages")]
    (installed / "others.pth").write_text("\n".join(others))
    for package in PACKAGES:
        shutil.copytree(package, installed / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    assert untyped(programs, tmp_path, TYPED) == ""
    assert untyped(programs, tmp_path, OPTIMIZING) == ""
    refused = untyped(programs, tmp_path, MISTYPED)
    assert refused.count("error:") == 2, refused
    assert "strateg" in refused
