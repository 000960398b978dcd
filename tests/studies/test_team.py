"""Trainings side by side: a failing one is named, and those still running are ended."""

import click
import pytest
from collage_studies.recipe import Plan, Recipe
from collage_studies.worker import Job, WorkerPool


def test_a_failed_training_is_named(tmp_path):
    job = Job(Plan("no-such-strategy", "bfloat16"), Recipe(steps=1), "g", "http://127.0.0.1:9", tmp_path)
    lines = []
    with (
        WorkerPool(lambda *line: lines.append(line)) as team,
        pytest.raises(click.ClickException, match="no-such-strat"),
    ):
        team.run([job])
    assert lines == []
