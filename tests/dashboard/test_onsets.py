"""Where points of a chart or a table merge steps: a change is placed within them, as the headline has it."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from collage_dashboard.pages.run_content import draw
from collage_dashboard.pages.run_curves import Story
from collage_dashboard.pages.run_layers import keys_of_layers, layer_rows
from collage_dashboard.view import View

from tests.dashboard.generated import GeneratedRun

EVERY, FALLS_AT = 40, 2960
"""It is the second measured step of a point of two, of a curve, and of four, of the table of layers."""


@dataclass
class Falling(GeneratedRun):
    """From a step on half of the updates, and of the descent, are lost; none before."""

    def totals(self, step):
        totals = super().totals(step)
        totals |= {"lost": 0.0 * totals["lost"], "faithful": totals["faithful"] + totals["lost"]}
        if step >= FALLS_AT:
            lost = np.floor(totals["faithful"] / 2)
            totals |= {"lost": lost, "faithful": totals["faithful"] - lost}
            totals |= {"intended_effective_sum": totals["intended_effective_sum"] / 2}
        return totals


FALLING = Falling("falling", "plus", run_id="run-falling", steps=16_000, every=EVERY, blocks=1)


@pytest.fixture
def falling(server):
    server.runs["run-falling"] = FALLING
    return FALLING


def mark_of(reader, axis, since):
    """Where the curve of lost updates is marked, and what its handle says."""
    view = View(page="run", runs=("run-falling",), tab="curves", axis=axis)
    figure = draw("series", "lost_update_ratio", view, reader, Story(strategy="plus", since=since))
    [line] = [shape for shape in figure.layout.shapes if shape.yref == "y domain"]
    [handle] = [note for note in figure.layout.annotations if note.text == "▾"]
    return line.x0, handle.hovertext


def test_a_curves_mark_is_the_headlines_step_where_the_curve_cannot_say_better(reader, falling):
    place, told = mark_of(reader, "step", FALLS_AT)
    assert place == FALLS_AT
    assert told.startswith(f"Updates lost changed at step {FALLS_AT:,}: ")


def test_a_curves_mark_is_not_before_the_change(reader, falling):
    for since in (None, 10_000):
        place, told = mark_of(reader, "step", since)
        found = re.match(r"Updates lost changed between steps ([\d,]+) and ([\d,]+): ", told)
        assert found
        before, changed = (int(step.replace(",", "")) for step in found.groups())
        assert before < FALLS_AT <= changed == place <= FALLS_AT + 2 * EVERY


def test_on_another_axis_the_mark_stands_at_the_point_that_holds_the_step(reader, falling):
    place, _ = mark_of(reader, "tokens", FALLS_AT)
    assert 2048 * FALLS_AT <= place <= 2048 * (FALLS_AT + 2 * EVERY)


def test_the_table_of_layers_has_since_when_each_loses_by_the_share_beside_it(reader, falling):
    run = reader.ask(lambda client: client.run("run-falling"))
    rows = layer_rows(reader, run.run_id, keys_of_layers(run), None)
    assert len(rows) == len(falling.layers)
    assert {FALLS_AT <= row["since"] <= FALLS_AT + 4 * EVERY for row in rows} == {True}


def test_a_layer_that_was_never_above_has_the_first_step(server, reader):
    server.runs["run-always"] = GeneratedRun("always", "plain", run_id="run-always", every=EVERY, blocks=1)
    server.runs["run-always"].totals = lambda _: GeneratedRun.totals(server.runs["run-always"], 200)
    run = reader.ask(lambda client: client.run("run-always"))
    rows = layer_rows(reader, run.run_id, keys_of_layers(run), None)
    assert {row["since"] for row in rows if row["edq_ratio"] < 0.9} == {EVERY}
