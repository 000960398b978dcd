"""The whole demo in small: services up, five trainings watched over HTTP, a summary of what is stored."""

import json
import os
import subprocess

import pytest

from tests.ports import command, free_port
from tests.studies.test_summary import NAMES

STEPS = 20


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(process, its summary) of a demo that ended by itself."""
    folder = tmp_path_factory.mktemp("demo")
    arguments = ["demo", "--exit", "--output", folder, "--steps", STEPS]
    arguments += ["--port", free_port(), "--dashboard-port", free_port()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLLAGE_")}
    process = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment, cwd=folder, timeout=280, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process, json.loads((folder / "summary.json").read_text())


def test_five_lines_with_every_number_measured(finished):
    _, lines = finished
    assert [(line["strategy"], line["dtype"]) for line in lines] == [
        ("plain", "float32"),
        ("plain", "bfloat16"),
        ("light", "bfloat16"),
        ("plus", "bfloat16"),
        ("master-weights", "bfloat16"),
    ]
    for line in lines:
        assert set(line) >= NAMES
        assert line["steps"] == STEPS
        undefined = {name for name, value in line.items() if value is None}
        assert not undefined, line


def test_everything_sent_is_stored_once(finished):
    for line in finished[1]:
        assert line["reports_sent"] == line["reports_stored"] > STEPS


def test_bytes_are_those_of_the_strategies(finished):
    expected = {"plain": 8, "light": 10, "plus": 12, "master-weights": 16}
    for line in finished[1]:
        size = 16 if line["dtype"] == "float32" else expected[line["strategy"]]
        assert line["bytes_per_parameter"] == pytest.approx(size, rel=0.02)


def test_the_comparison_and_its_address_are_printed(finished):
    process, lines = finished
    assert f"step {STEPS}/{STEPS}" in process.stdout
    assert all(line["run_id"] in process.stdout for line in lines)
    assert "master-weights" in process.stdout
