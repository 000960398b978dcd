"""Each mirror against its real package, in an environment of its own; for the long lane."""

import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS = ("mirror_mlflow", "mirror_trackio", "mirror_wandb")


@pytest.mark.nightly
@pytest.mark.parametrize("door", DOORS)
def test_a_tracker_s_own_store_has_every_row(door, tmp_path):
    module = import_module(f"drills.doors.{door}")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *module.PACKAGES]
    subprocess.run(pip, check=True)
    # Everything else is this environment's, behind what the tracker brings.
    (folder,) = environment.glob("lib/python*/site-packages")
    sites = dict.fromkeys(path for path in sys.path if path and Path(path).is_dir() and Path(path) != ROOT)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    lines = [str(ROOT), *(f"import site; site.addsitedir({path!r})" for path in sites if path not in standard)]
    (folder / "project.pth").write_text("\n".join([*lines, ""]))
    done = subprocess.run(
        [python, "-m", f"drills.doors.{door}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
