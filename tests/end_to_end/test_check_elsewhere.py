"""`check` as a GitHub action and as a hook of pre-commit: what the two files run, and that it can fail."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.test_preflight import HEALTHY, SICK
from tests.forking import command
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
INSTALL, CHECK = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
CONDITION = "--steps 40 --fail-if 'losing-updates'"


def ran(words, folder, **variables):
    """The finished process, in which `collage-monitor` is this checkout's."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "collage-monitor").write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    (programs / "collage-monitor").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COLLAGE_", "XDG_"))}
    environment |= {"PATH": f"{programs}:{environment['PATH']}", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= variables
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


@pytest.mark.parametrize(
    ("door", "text", "status"),
    [("action", SICK, 1), ("action", HEALTHY, 0), ("hook", SICK, 1)],
    ids=["sick action", "healthy action", "sick hook"],
)
def test_it_fails_if_the_training_loses_its_updates(door, text, status, tmp_path):
    (tmp_path / "my train.py").write_text(text)
    program = f"-- {sys.executable} 'my train.py'"
    if door == "action":
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", CHECK["run"]]
        done = ran(words, tmp_path, ARGUMENTS=f"{CONDITION}\n{program}\n")
    else:
        done = ran([*shlex.split(HOOK["entry"]), *shlex.split(f"{CONDITION} {program}")], tmp_path)
    assert done.returncode == status, done.stderr
    assert ("losing updates" in done.stdout) is bool(status)


@pytest.mark.parametrize("arguments", ["", "--steps 'unfinished"])
def test_an_action_without_words_fails(arguments, tmp_path):
    done = ran(["bash", "-eo", "pipefail", "-c", CHECK["run"]], tmp_path, ARGUMENTS=arguments)
    assert done.returncode != 0


def test_the_action_installs_the_three_distributions_of_its_own_version():
    folders = re.findall(r'"\$GITHUB_ACTION_PATH([^"]*)"', INSTALL["run"])
    assert folders == ["/agent", "[agent]", "/server"]
    assert all(
        (ROOT / folder.removesuffix("[agent]").lstrip("/") / "pyproject.toml").exists() for folder in folders
    )


def test_neither_runs_at_each_commit_or_on_single_files():
    assert not HOOK["pass_filenames"]
    assert HOOK["always_run"]
    assert "pre-commit" not in HOOK["stages"]
