"""What stands in each curve of a run: the threshold of the alert about it, and since when it is different."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import pytest
from collage_dashboard.figures.series import shade_beyond
from collage_dashboard.figures.stack import stack_height
from collage_dashboard.pages.run_content import draw
from collage_dashboard.pages.run_marks import Story
from collage_dashboard.view import View

from collage_monitor.alerts import ALERTS
from tests.dashboard.generated import GeneratedRun

STACKED = ("loss", "edq_ratio", "lost_update_ratio", "learning_rate")
JUMPED_AT = 800


@dataclass
class Jumping(GeneratedRun):
    """From a step on half of the updates are lost; the loss and the rate know nothing of it."""

    def totals(self, step):
        totals = super().totals(step)
        if step >= JUMPED_AT:
            lost = np.floor(totals["faithful"] / 2)
            totals |= {"lost": lost, "faithful": totals["faithful"] - lost}
        return totals

    def scalars(self, step):
        return super().scalars(step) | {"loss": float(2.5 + 0.03 * np.sin(step * 1.7))}


def axis_of(metric):
    """The name of a metric's y axis in the stack."""
    place = STACKED.index(metric)
    return f"y{place + 1}" if place else "y"


def drawn(reader, run_id, strategy, **view):
    return draw("stack", "stack", View(page="run", runs=(run_id,), **view), reader, Story(strategy=strategy))


def bands(figure, metric):
    """(from, to, words) of what is shaded in a curve."""
    return [
        (shape.y0, shape.y1, shape.label.text)
        for shape in figure.layout.shapes
        if shape.type == "rect" and shape.yref == axis_of(metric)
    ]


def onsets(figure, metric):
    """The steps at which one curve alone is marked."""
    return [shape.x0 for shape in figure.layout.shapes if shape.yref == f"{axis_of(metric)} domain"]


def test_an_alerts_threshold_is_a_band_in_the_curves_that_come_near_it(reader):
    figure = drawn(reader, "run-plain", "plain")
    [(low, high, words)] = bands(figure, "edq_ratio")
    assert low < high == 0.9
    assert words == "CollageEdqLow: below 0.9"
    [(low, high, words)] = bands(figure, "lost_update_ratio")
    assert low == 25 < high
    assert words == "CollageUpdatesLost: above 25.0 %"
    assert not bands(figure, "loss")
    figure = drawn(reader, "run-plus", "plus")
    assert not bands(figure, "edq_ratio"), "far from it, the band would flatten the curve"
    assert not bands(figure, "lost_update_ratio")


def test_a_curve_that_no_alert_judges_has_no_band(reader):
    assert not bands(drawn(reader, "run-live", "stochastic"), "lost_update_ratio"), "the window is judged"
    assert not bands(drawn(reader, "run-plain", "plain", layer="head.weight"), "edq_ratio"), "the model is judged"


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_band_stands_on_either_scale(reader, scale):
    [(low, high, _)] = bands(drawn(reader, "run-plain", "plain", scale=scale), "edq_ratio")
    assert 0 < low < high == 0.9


def test_an_onset_is_marked_in_the_curve_that_has_it_and_found_while_the_run_lives(server, reader):
    """Only EDQ's were marked, and in all curves alike."""
    run = Jumping("jumping", "plus", run_id="run-jumping", steps=JUMPED_AT - 10, state="running")
    server.runs[run.run_id] = run
    assert onsets(drawn(reader, run.run_id, "plus"), "lost_update_ratio") == []
    run.steps = 2 * JUMPED_AT
    figure = drawn(reader, run.run_id, "plus")
    assert onsets(figure, "lost_update_ratio") == [JUMPED_AT]
    assert onsets(figure, "loss") == onsets(figure, "learning_rate") == []
    [handle] = [note for note in figure.layout.annotations if note.text == "▾"]
    assert handle.hovertext.startswith("Updates lost changed at step 800: 0 % before, 50.0 % after")
    assert 0 < handle.y < 1, "above its own curve"


def test_a_tabs_curves_are_marked_alike(server, reader):
    server.runs["run-jumping"] = Jumping("jumping", "plus", run_id="run-jumping", steps=2 * JUMPED_AT)
    view = View(page="run", runs=("run-jumping",), tab="curves")
    figure = draw("series", "lost_update_ratio", view, reader, Story(strategy="plus"))
    assert [shape.x0 for shape in figure.layout.shapes if shape.yref == "y domain"] == [JUMPED_AT]
    assert [shape.y0 for shape in figure.layout.shapes if shape.type == "rect"] == [25]


def test_each_curve_has_its_110_pixels_whatever_is_marked(reader):
    view = View(page="run", runs=("run-plain",))
    for marks in ((), ((100, "attempt 2"),)):
        layout = draw("stack", "stack", view, reader, Story(marks=marks)).layout
        assert layout.height == stack_height(len(STACKED))
        assert layout.height - layout.margin.t - layout.margin.b == 110 * len(STACKED)


@pytest.mark.parametrize(
    ("values", "logarithmic"), [([None, None], False), ([0.0, -1.0], True), ([float("nan")], False)]
)
def test_a_curve_without_a_point_to_draw_has_no_band(values, logarithmic):
    """The page of such a run ended in an error."""
    figure = go.Figure(go.Scatter(x=list(range(len(values))), y=values))
    figure.update_layout(yaxis={"type": "log" if logarithmic else "linear"})
    condition = next(entry for entry in ALERTS["CollageEdqLow"].conditions)
    assert not shade_beyond(figure, condition, "words").layout.shapes
