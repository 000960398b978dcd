"""README: the benchmarks that it names are there, and the cost of the first steps is theirs."""

import re
from pathlib import Path

import pytest

from benchmarks import _training, first_steps

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_each_benchmark_that_the_readme_names_is_there():
    named = set(re.findall(r"python -m benchmarks\.(\w+)", README))
    assert {"watch", "device", "first_steps"} <= named
    assert [name for name in named if not (ROOT / "benchmarks" / f"{name}.py").is_file()] == []


def test_the_readme_says_over_how_many_steps_the_beginning_was_measured():
    assert f"first {first_steps.STEPS} steps" in README


@pytest.mark.nightly
def test_the_agents_cost_is_a_part_of_the_watched_training_and_holds_the_first_measured_step(monkeypatch):
    monkeypatch.setattr(_training, "LAYERS", 2)
    monkeypatch.setattr(first_steps, "WARM_UP", 1)
    found = first_steps.begin(2, 0)
    assert 0 < found.agent < found.watched
    assert found.alone > 0
    # Two trainings of one seed take the same steps: without the agent's part they are alike, on a busy machine too.
    assert 0.3 < (found.watched - found.agent) / found.alone < 3
