"""What stands in each curve of a run: the threshold of the alert about it, and since when it is different."""

import re

import numpy as np
import plotly.graph_objects as go
import pytest
from collage_dashboard.figures.series import shade_beyond
from collage_dashboard.pages.run_content import draw
from collage_dashboard.pages.run_curves import Story, cured_at
from collage_dashboard.pages.run_layers import keys_of_layers, layer_rows
from collage_dashboard.view import View

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.diagnosis import percent
from collage_monitor.run_history import read_forecast
from collage_monitor.schedule import parse_schedule
from tests.dashboard.generated import GeneratedRun

METRICS = ("loss", "edq_ratio", "lost_update_ratio", "learning_rate")
JUMPED_AT = 800


def half_lost(faithful):
    """The totals where half of the faithful updates are lost."""
    lost = np.floor(faithful / 2)
    return {"lost": lost, "faithful": faithful - lost}


def jumping(run_id, **more):
    """From a step on half of the updates are lost; the loss and the rate know nothing of it."""

    def sums(totals, step):
        return half_lost(totals["faithful"]) if step >= JUMPED_AT else {}

    def logs(step):
        return {"loss": float(2.5 + 0.03 * np.sin(step * 1.7))}

    return GeneratedRun(run_id, "plus", run_id=run_id, sums=sums, logs=logs, **more)


def drawn(reader, run_id, strategy, **view):
    """By metric its curve as the first screen draws it."""
    shown = View(page="run", runs=(run_id,), **view)
    return {metric: draw("first", metric, shown, reader, Story(strategy=strategy)) for metric in METRICS}


def bands(figure):
    """(from, to) of what is shaded in a curve."""
    return [(shape.y0, shape.y1) for shape in figure.layout.shapes if shape.type == "rect"]


def onsets(figure):
    """The steps at which a curve is marked."""
    return [shape.x0 for shape in figure.layout.shapes if shape.yref == "y domain"]


def lines(figure):
    """The steps at which something is marked from the bottom to the top."""
    return [shape.x0 for shape in figure.layout.shapes if shape.type == "line" and shape.x0 == shape.x1]


def handle(figure):
    """What the mark of a curve says."""
    [note] = [note for note in figure.layout.annotations if note.text == "▾"]
    return note.hovertext


MARKED = [("first", "loss"), ("first", "edq_ratio"), ("heatmap", "lost_update_ratio")]


@pytest.mark.parametrize(("run_id", "strategy"), [("run-plain", "plain"), ("run-plus", "plus")])
def test_an_alerts_threshold_is_a_band_to_the_end_of_the_fixed_scale_without_words_over_the_curve(
    reader, run_id, strategy
):
    figures = drawn(reader, run_id, strategy)
    assert bands(figures["edq_ratio"]) == [(0, 0.9)]
    assert bands(figures["lost_update_ratio"]) == [(25, 100)]
    assert not bands(figures["loss"])
    assert not any(shape.label.text for figure in figures.values() for shape in figure.layout.shapes)


def test_a_tabs_curve_has_its_band_where_it_comes_near_it_and_an_alert_judges_it(reader):
    def band(run_id, strategy):
        view = View(page="run", runs=(run_id,), tab="curves")
        return bands(draw("series", "edq_ratio", view, reader, Story(strategy=strategy)))

    [(low, high)] = band("run-plain", "plain")
    assert 0.7 < low < high == 0.9
    assert not band("run-plus", "plus"), "far from it, the band would flatten the curve"
    assert not bands(drawn(reader, "run-live", "stochastic")["lost_update_ratio"]), "the window is judged"
    assert not bands(drawn(reader, "run-plain", "plain", layer="head.weight")["edq_ratio"]), "the model is judged"


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_band_stands_on_either_scale(reader, scale):
    [(low, high)] = bands(drawn(reader, "run-plain", "plain", scale=scale)["edq_ratio"])
    assert 0 <= low < high == 0.9


@pytest.mark.slow
def test_an_onset_is_marked_in_the_curve_that_has_it_and_found_while_the_run_lives(server, reader):
    """Only EDQ's were marked, and in all curves alike."""
    run = jumping("run-jumping", steps=JUMPED_AT - 10, state="running")
    server.runs[run.run_id] = run
    assert onsets(drawn(reader, run.run_id, "plus")["lost_update_ratio"]) == []
    run.steps = 2 * JUMPED_AT
    figures = drawn(reader, run.run_id, "plus")
    assert onsets(figures["lost_update_ratio"]) == [JUMPED_AT]
    assert onsets(figures["loss"]) == onsets(figures["learning_rate"]) == []
    told = handle(figures["lost_update_ratio"])
    assert told.startswith("Updates lost changed at step 800: 0 % before, 50.0 % after")
    view = View(page="run", runs=("run-jumping",), tab="curves")
    of_the_tab = draw("series", "lost_update_ratio", view, reader, Story(strategy="plus"))
    assert onsets(of_the_tab) == [JUMPED_AT]
    assert [low for low, _ in bands(of_the_tab)] == [25]


def test_each_curve_of_the_first_screen_has_160_pixels_whatever_is_marked(reader):
    view = View(page="run", runs=("run-plain",))
    for marks in ((), ((100, "attempt 2"),)):
        for metric in METRICS[:3]:
            layout = draw("first", metric, view, reader, Story(marks=marks)).layout
            assert layout.height - layout.margin.t - layout.margin.b >= 155


def test_where_it_began_is_marked_in_every_curve_and_in_the_heatmap(reader):
    view = View(page="run", runs=("run-plain",))
    for kind, metric in MARKED:
        for marks in ((), ((50, "note by ada"),)):
            assert lines(draw(kind, metric, view, reader, Story(since=50, marks=marks))) == [50]


@pytest.mark.parametrize("axis", ["step", "tokens"])
def test_the_step_of_a_clicked_cell_is_marked_in_every_curve_and_in_the_heatmap(reader, axis):
    view = View(page="run", runs=("run-plain",), layer="head.weight", step=50, axis=axis)
    for kind, metric in MARKED:
        figure = draw(kind, metric, view, reader, Story())
        assert lines(figure) == [50 if axis == "step" else 2048 * 50], (kind, metric)


def lost(run, first, last):
    """The share lost between two steps, from the totals that were sent."""
    sent = [run.model_totals(step) for step in run.measured if first <= step <= last]
    total = {key: sum(own[key] for own in sent) for key in ("lost", "elements", "idle")}
    return percent(total["lost"] / (total["elements"] - total["idle"]))


CURED = jumping("cured", steps=2000)


@pytest.mark.slow
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
    assert onsets(figure) == [known.onset]
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
    condition, *_ = ALERTS["CollageEdqLow"].conditions
    assert not shade_beyond(figure, condition).layout.shapes


EVERY, FALLS_AT = 40, 2960
"""It is the second measured step of a point of two, of a curve, and of four, of the table of layers."""


def falling(totals, step):
    """From a step on half of the updates, and of the descent, are lost; none before."""
    faithful = totals["faithful"] + totals["lost"]
    if step < FALLS_AT:
        return {"lost": 0.0 * faithful, "faithful": faithful}
    return half_lost(faithful) | {"intended_effective_sum": totals["intended_effective_sum"] / 2}


FALLING = GeneratedRun("falling", "plus", steps=16_000, every=EVERY, blocks=1, sums=falling)


def mark_of(server, reader, axis, since):
    """Where points of the curve of lost updates merge steps: where it is marked, and what its handle says."""
    server.runs["run-falling"] = FALLING
    view = View(page="run", runs=("run-falling",), tab="curves", axis=axis)
    figure = draw("series", "lost_update_ratio", view, reader, Story(strategy="plus", since=since))
    [place] = onsets(figure)
    return place, handle(figure)


@pytest.mark.slow
def test_a_curves_mark_is_the_headlines_step_where_the_curve_cannot_say_better(server, reader):
    place, told = mark_of(server, reader, "step", FALLS_AT)
    assert place == FALLS_AT
    assert told.startswith(f"Updates lost changed at step {FALLS_AT:,}: ")
    place, _ = mark_of(server, reader, "tokens", FALLS_AT)
    assert 2048 * FALLS_AT <= place <= 2048 * (FALLS_AT + 2 * EVERY), "the point that holds the step"


@pytest.mark.slow
@pytest.mark.parametrize("since", [None, 10_000])
def test_a_curves_mark_is_not_before_the_change(server, reader, since):
    place, told = mark_of(server, reader, "step", since)
    found = re.match(r"Updates lost changed between steps ([\d,]+) and ([\d,]+): ", told)
    assert found
    before, changed = (int(step.replace(",", "")) for step in found.groups())
    assert before < FALLS_AT <= changed == place <= FALLS_AT + 2 * EVERY


def layers_of(server, reader, run):
    """The rows of the table of layers of this run."""
    server.runs[run.run_id] = run
    return layer_rows(reader, run.run_id, keys_of_layers(server.client().run(run.run_id)), None)


def test_the_table_of_layers_has_since_when_each_loses_by_the_share_beside_it(server, reader):
    rows = layers_of(server, reader, FALLING)
    assert len(rows) == len(FALLING.layers)
    assert {FALLS_AT <= row["since"] <= FALLS_AT + 4 * EVERY for row in rows} == {True}


def test_a_layer_that_was_never_above_has_the_first_step(server, reader):
    last = GeneratedRun("always", "plain", every=EVERY, blocks=1).totals(200)
    always = GeneratedRun("always", "plain", every=EVERY, blocks=1, sums=lambda totals, step: last)
    rows = layers_of(server, reader, always)
    assert {row["since"] for row in rows if row["edq_ratio"] < 0.9} == {EVERY}
