"""docs/tutorials/sick-to-cured.md, followed to the letter: its files, its commands, and what they print."""

import os

import pytest

from tests.docs.blocks import blocks, outputs
from tests.forking import TRAINING, command, run_forked

pytestmark = pytest.mark.slow
PAGE = "tutorials/sick-to-cured.md"


def call(folder, line):
    """What a line of the page prints, with this environment's Python."""
    first, *rest = line.split()
    words = rest if first == "python" else command(*rest)[1:]
    environment = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = run_forked(TRAINING, *words, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorial_leads_from_losing_updates_to_healthy(tmp_path):
    training, cure = blocks(PAGE)
    _, train, audit, convert, resume = [code.strip() for code in blocks(PAGE, "sh")]
    sick, paste, healthy = outputs(PAGE)
    marker = "# The cure goes here.\n"
    assert marker in training
    (tmp_path / "train.py").write_text(training)
    said = call(tmp_path, train)
    assert said.startswith(sick.rstrip()), said
    assert "second-moment" in call(tmp_path, f"{audit} --json")
    assert paste.strip() in call(tmp_path, convert)
    (tmp_path / "train.py").write_text(training.replace(marker, cure))
    assert (tmp_path / "last-cured.pt").exists()
    said = call(tmp_path, resume)
    assert said.startswith(healthy.rstrip()), said
