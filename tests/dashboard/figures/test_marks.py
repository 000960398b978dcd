"""What stands in each curve of a run: the threshold of the alert about it, and since when it is different."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import pytest
from collage_dashboard.figures.series import shade_beyond
from collage_dashboard.pages.run_content import draw
from collage_dashboard.pages.run_curves import Story, cured_at
from collage_dashboard.view import View

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.diagnosis import percent
from collage_monitor.run_history import read_forecast
from collage_monitor.schedule import parse_schedule
from tests.dashboard.generated import GeneratedRun

METRICS = ("loss", "edq_ratio", "lost_update_ratio", "learning_rate")
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


def drawn(reader, run_id, strategy, **view):
    """By metric its curve as the first screen draws it."""
    shown = View(page="run", runs=(run_id,), **view)
    return {metric: draw("first", metric, shown, reader, Story(strategy=strategy)) for metric in METRICS}


def bands(figures, metric):
    """(from, to) of what is shaded in a curve."""
    return [(shape.y0, shape.y1) for shape in figures[metric].layout.shapes if shape.type == "rect"]


def onsets(figures, metric):
    """The steps at which a curve is marked."""
    return [shape.x0 for shape in figures[metric].layout.shapes if shape.yref == "y domain"]


@pytest.mark.parametrize(("run_id", "strategy"), [("run-plain", "plain"), ("run-plus", "plus")])
def test_an_alerts_threshold_is_a_band_to_the_end_of_the_fixed_scale_without_words_over_the_curve(
    reader, run_id, strategy
):
    figures = drawn(reader, run_id, strategy)
    assert bands(figures, "edq_ratio") == [(0, 0.9)]
    assert bands(figures, "lost_update_ratio") == [(25, 100)]
    assert not bands(figures, "loss")
    assert not any(shape.label.text for figure in figures.values() for shape in figure.layout.shapes)


def test_a_tabs_curve_has_its_band_where_it_comes_near_it(reader):
    def band(run_id, strategy):
        view = View(page="run", runs=(run_id,), tab="curves")
        figure = draw("series", "edq_ratio", view, reader, Story(strategy=strategy))
        return [(shape.y0, shape.y1) for shape in figure.layout.shapes if shape.type == "rect"]

    [(low, high)] = band("run-plain", "plain")
    assert 0.7 < low < high == 0.9
    assert not band("run-plus", "plus"), "far from it, the band would flatten the curve"


def test_a_curve_that_no_alert_judges_has_no_band(reader):
    assert not bands(drawn(reader, "run-live", "stochastic"), "lost_update_ratio"), "the window is judged"
    assert not bands(drawn(reader, "run-plain", "plain", layer="head.weight"), "edq_ratio"), "the model is judged"


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_band_stands_on_either_scale(reader, scale):
    [(low, high)] = bands(drawn(reader, "run-plain", "plain", scale=scale), "edq_ratio")
    assert 0 <= low < high == 0.9


def test_an_onset_is_marked_in_the_curve_that_has_it_and_found_while_the_run_lives(server, reader):
    """Only EDQ's were marked, and in all curves alike."""
    run = Jumping("jumping", "plus", run_id="run-jumping", steps=JUMPED_AT - 10, state="running")
    server.runs[run.run_id] = run
    assert onsets(drawn(reader, run.run_id, "plus"), "lost_update_ratio") == []
    run.steps = 2 * JUMPED_AT
    figures = drawn(reader, run.run_id, "plus")
    assert onsets(figures, "lost_update_ratio") == [JUMPED_AT]
    assert onsets(figures, "loss") == onsets(figures, "learning_rate") == []
    [handle] = [note for note in figures["lost_update_ratio"].layout.annotations if note.text == "▾"]
    assert handle.hovertext.startswith("Updates lost changed at step 800: 0 % before, 50.0 % after")


def test_a_tabs_curves_are_marked_alike(server, reader):
    server.runs["run-jumping"] = Jumping("jumping", "plus", run_id="run-jumping", steps=2 * JUMPED_AT)
    view = View(page="run", runs=("run-jumping",), tab="curves")
    figure = draw("series", "lost_update_ratio", view, reader, Story(strategy="plus"))
    assert [shape.x0 for shape in figure.layout.shapes if shape.yref == "y domain"] == [JUMPED_AT]
    assert [shape.y0 for shape in figure.layout.shapes if shape.type == "rect"] == [25]


def test_each_curve_of_the_first_screen_has_160_pixels_whatever_is_marked(reader):
    view = View(page="run", runs=("run-plain",))
    for marks in ((), ((100, "attempt 2"),)):
        for metric in METRICS[:3]:
            layout = draw("first", metric, view, reader, Story(marks=marks)).layout
            assert layout.height - layout.margin.t - layout.margin.b >= 155


def test_where_it_began_is_marked_in_every_curve_and_in_the_heatmap(reader):
    view = View(page="run", runs=("run-plain",))
    for kind, metric in (("first", "loss"), ("first", "edq_ratio"), ("heatmap", "lost_update_ratio")):
        for marks in ((), ((50, "note by ada"),)):
            figure = draw(kind, metric, view, reader, Story(since=50, marks=marks))
            places = [shape.x0 for shape in figure.layout.shapes if shape.type == "line" and shape.x0 == shape.x1]
            assert places == [50]


@pytest.mark.parametrize("axis", ["step", "tokens"])
def test_the_step_of_a_clicked_cell_is_marked_in_every_curve_and_in_the_heatmap(reader, axis):
    view = View(page="run", runs=("run-plain",), layer="head.weight", step=50, axis=axis)
    for kind, metric in (("first", "loss"), ("first", "edq_ratio"), ("heatmap", "lost_update_ratio")):
        figure = draw(kind, metric, view, reader, Story())
        places = [shape.x0 for shape in figure.layout.shapes if shape.type == "line" and shape.x0 == shape.x1]
        assert places == [50 if axis == "step" else 2048 * 50], (kind, metric)


def lost(run, first, last):
    """The share lost between two steps, from the totals that were sent."""
    sent = [run.model_totals(step) for step in run.measured if first <= step <= last]
    total = {key: sum(own[key] for own in sent) for key in ("lost", "elements", "idle")}
    return percent(total["lost"] / (total["elements"] - total["idle"]))


CURED = Jumping("cured", "plus", steps=2000, run_id="cured")


@pytest.mark.parametrize("view", [{}, {"step": 800}])
def test_before_and_after_a_cure_or_the_clicked_step_is_one_picture(server, reader, view):
    server.runs["cured"] = CURED
    story = Story(cured=cured_at([event("attempt", 1, step=1), event("conversion", 1, step=799)]))
    figure = draw("first", "lost_update_ratio", View(page="run", runs=("cured",), **view), reader, story)
    before, after = lost(CURED, 800 - 5 * CURED.every, 799), lost(CURED, 800, 2000)
    assert figure.layout.title.text == f"{before} → {after} since step 800"
    assert figure.layout.height - figure.layout.margin.t - figure.layout.margin.b >= 155
    assert draw("first", "edq_ratio", View(page="run", runs=("cured",)), reader, story).layout.title.text is None
    of_layer = View(page="run", runs=("cured",), layer="blocks.1.mlp.up.weight", step=800)
    told = draw("first", "lost_update_ratio", of_layer, reader, story).layout.title.text
    assert told.startswith("…mlp.up.weight: 0 % → 50.0 %"), "short enough for a third of a laptop's screen"


@pytest.mark.parametrize("schedule", ["cosine:2e-4:10:400", "constant:2e-4:10:300", "linear:1:2"])
def test_what_a_schedule_will_lose_is_drawn_before_it_happens(server, reader, schedule):
    view = View(page="run", runs=("run-plain",), schedule=schedule)
    figure = draw("first", "lost_update_ratio", view, reader, Story(strategy="plain"))
    if schedule == "linear:1:2":
        [note] = [own.text for own in figure.layout.annotations if own.text.startswith("No forecast")]
        assert "schedule 'linear:1:2'" in note.replace("<br>", " ")
        assert "forecast" not in {trace.name for trace in figure.data}
        return
    with server.client() as client:
        known = read_forecast(client, "run-plain", parse_schedule(schedule)).strategies[0]
    [ahead] = [trace for trace in figure.data if trace.name == "forecast"]
    assert (ahead.x[0], ahead.x[-1]) == (201, parse_schedule(schedule).steps)
    steps, shares = zip(*known.shares, strict=True)
    assert (ahead.x, ahead.y) == (steps, pytest.approx([100 * share for share in shares]))
    assert figure.layout.title.text == f"forecast: over 25.0 % from step {known.onset}"
    assert onsets({"lost": figure}, "lost") == [known.onset]
    plain = draw("first", "lost_update_ratio", View(page="run", runs=("run-plain",)), reader, Story())
    assert "forecast" not in {trace.name for trace in plain.data}


def event(kind, attempt, step=None):
    """An event as the server tells it."""
    return wire.Event(event=attempt, time=0.0, kind=kind, text="", attempt=attempt, step=step)


def test_a_cure_is_a_conversion_or_a_launch_that_keeps_weights_otherwise():
    launches = [event("attempt", 1, step=1), event("attempt", 2, step=61)]
    assert cured_at(launches) is None
    assert cured_at([*launches, event("kept_otherwise", 2)]) == 61
    assert cured_at([*launches, event("kept_otherwise", 2), event("conversion", 2, step=100)]) == 101


@pytest.mark.parametrize(
    ("values", "logarithmic"), [([None, None], False), ([0.0, -1.0], True), ([float("nan")], False)]
)
def test_a_curve_without_a_point_to_draw_has_no_band(values, logarithmic):
    """The page of such a run ended in an error."""
    figure = go.Figure(go.Scatter(x=list(range(len(values))), y=values))
    figure.update_layout(yaxis={"type": "log" if logarithmic else "linear"})
    condition = next(entry for entry in ALERTS["CollageEdqLow"].conditions)
    assert not shade_beyond(figure, condition).layout.shapes
