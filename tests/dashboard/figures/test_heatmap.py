"""The heatmap: neutral at the ideal, gaps, two hundred layers, the selected one."""

import math

import msgspec
import numpy as np
import pytest
from collage_dashboard.figures import heatmap
from collage_dashboard.figures.growth import as_sent
from collage_dashboard.figures.heatmap import (
    LARGEST_HEIGHT,
    REACH,
    SMALLEST_HEIGHT,
    block_of,
    short_layer,
    short_layers,
)

from tests.dashboard.figures.answers import heatmap_answer


def rows_of(count, **more):
    """The figure of so many layers, all alike."""
    return heatmap(heatmap_answer([[0.9]] * count), **more)


def cells_of(values, metric="edq_ratio"):
    """What a heatmap of these values draws."""
    return heatmap(heatmap_answer(values, metric)).data[0]


def colour(text):
    """Red, green and blue of '#RRGGBB'."""
    return [int(text[at : at + 2], 16) for at in (1, 3, 5)]


def test_cells_rows_and_hover():
    figure = heatmap(heatmap_answer([[1.0, 0.9], [None, 0.5]]))
    trace = figure.data[0]
    assert as_sent(figure)["data"][0]["z"] == [[1.0, 0.9], [None, 0.5]]
    assert list(trace.x) == [10, 20]
    assert list(trace.y) == ["layer.0", "layer.1"]
    assert trace.hovertemplate == "%{y}<br>step %{x:,}<br>%{text}<extra></extra>"
    assert trace.meta == {"form": "ratio"}
    assert trace.hoverongaps is False
    merged = msgspec.structs.replace(heatmap_answer([[1.0, 0.9]]), first_steps=[1, 11])
    assert heatmap(merged).data[0].hovertemplate.startswith("%{y}<br>merged up to step %{x:,}<br>")


def test_the_middle_of_the_colours_is_the_ideal_and_the_scale_is_the_same_for_every_run():
    scales = set()
    for worst in (0.95, 0.45, 1.0 - 1e-7):
        trace = cells_of([[1.0, worst]])
        assert math.isclose((trace.zmin + trace.zmax) / 2, 1.0)
        assert trace.zmax - trace.zmin >= 0.04 - 1e-12, "noise around the ideal stays pale"
        scales.add((trace.zmin, trace.zmax))
    assert scales == {(1.0 - REACH, 1.0 + REACH)}
    trace = cells_of([[1.0, 0.9]], "measured_ratio")
    assert (trace.zmin, trace.zmax) == pytest.approx((100 * (1.0 - REACH), 100 * (1.0 + REACH))), "in percent"


def test_a_loss_that_is_judged_as_one_is_no_longer_pale():
    """At EDQ 0.95 updates are lost: a run that lost 27 % of them was grey."""
    trace = cells_of([[1.0, 0.95]])
    [clear] = [told for place, told in trace.colorscale if math.isclose(place, 0.45)]
    red, _, blue = colour(clear)
    assert red - blue > 80
    assert math.isclose(trace.zmin + 0.45 * (trace.zmax - trace.zmin), 0.95)


def test_a_share_lost_is_in_percent_steps_where_its_alert_begins_and_stands_out_the_worse_it_is():
    trace = cells_of([[0.0, 0.3]], "lost_update_ratio")
    assert (trace.zmin, trace.zmax) == (0.0, 100.0), "from none to all"
    assert list(trace.z[0]) == [0.0, 30.0]
    assert trace.meta["form"] == "share"
    for scheme, ground in (("light", 255), ("dark", 36)):
        places, colours = zip(*trace.meta[scheme], strict=True)
        assert places[1] == places[2] == 0.25, "a step"
        away = [abs(np.dot(colour(told), (0.21, 0.72, 0.07)) - ground) for told in colours]
        assert away == sorted(away), scheme
        below, beyond = (colour(told) for told in colours[1:3])
        assert beyond[0] - beyond[2] > 80 > below[0] - below[2]
    assert [list(stop) for stop in trace.colorscale] == trace.meta["light"]


def test_the_selected_row_has_a_frame_and_keeps_its_label_whatever_is_thinned_out():
    [frame] = rows_of(5, selected="layer.3").layout.shapes
    assert (frame.y0, frame.y1) == (2.5, 3.5)
    axis = rows_of(200, selected="layer.101").layout.yaxis
    assert "<b>▸ layer.101</b>" in axis.ticktext
    assert "layer.101" in axis.tickvals


def test_layers_of_a_group_stand_together_under_its_name_in_the_answers_order():
    answer = heatmap_answer([[0.1], [0.2], [0.3], [0.4]])
    figure = heatmap(answer, selected="layer.2", groups={f"layer.{at}": f"<{'ab'[at % 2]}>" for at in range(4)})
    trace = figure.data[0]
    assert list(trace.y) == ["▾ <a>", "layer.0", "layer.2", "▾ <b>", "layer.1", "layer.3"]
    assert as_sent(figure)["data"][0]["z"] == [[None], [0.1], [0.3], [None], [0.2], [0.4]]
    labels = ["<b>&lt;a&gt;</b>", "0", "<b>▸ layer.2</b>", "<b>&lt;b&gt;</b>", "1", "3"]
    assert list(figure.layout.yaxis.ticktext) == labels
    [frame] = figure.layout.shapes
    assert (frame.y0, frame.y1) == (1.5, 2.5), "the frame is around the selected layer, wherever it stands now"


def test_groups_keep_their_names_where_layers_are_too_many_for_theirs():
    groups = {f"layer.{place}": f"block {place // 20}" for place in range(200)}
    shown = list(rows_of(200, groups=groups).layout.yaxis.ticktext)
    assert [text for text in shown if "block" in text] == [f"<b>block {place}</b>" for place in range(10)]
    assert len(shown) * 12 <= LARGEST_HEIGHT


def test_labels_leave_out_what_all_layers_share_and_are_cut_from_the_left():
    names = [f"model.layers.{place}.attention.{part}.weight" for place in (0, 1) for part in ("q", "k")]
    short = ["0.attention.q", "0.attention.k", "1.attention.q", "1.attention.k"]
    assert list(short_layers(names).values()) == short
    assert short_layers(["only.weight"]) == {"only.weight": "only.weight"}
    assert set(short_layers(["a", "a.b"]).values()) == {"a", "a.b"}
    assert short_layers(["a.b", "a.a.b"]) == {"a.b": "b", "a.a.b": "a.b"}
    assert len(short_layers(["x" * 300, "y" * 300])["x" * 300]) == 34
    assert short_layer("a" * 100 + "weight").endswith("aweight")
    assert len(short_layer("a" * 100)) == 34
    assert short_layer("head.weight") == "head.weight"
    found = [block_of(name) for name in ("model.layers.3.mlp.0.weight", "embedding.weight", "head")]
    assert found == ["model.layers.3", "embedding", "head"]


def test_a_norm_is_coloured_by_its_logarithm_and_says_so():
    trace = cells_of([[0.01, 100.0]], "grad_norm")
    assert list(trace.z[0]) == [-2.0, 2.0]
    assert trace.colorbar.title.text.startswith("log₁₀")
    assert list(trace.customdata[0]) == [0.01, 100.0]


def test_two_hundred_layers_fit_a_screen_with_labels_that_do_not_collide():
    figure = rows_of(200)
    assert figure.layout.height == LARGEST_HEIGHT
    assert len(figure.data[0].z) == 200
    assert len(figure.layout.yaxis.tickvals) * 12 <= LARGEST_HEIGHT
    assert len(rows_of(60).layout.yaxis.tickvals) == 60, "each of sixty has its own"
    assert rows_of(2).layout.yaxis.autorange == "reversed", "depth runs downwards"


def test_without_a_value_it_says_so_and_non_finite_cells_are_counted():
    figure = heatmap(heatmap_answer([[None]]))
    assert not figure.data
    assert figure.layout.height == SMALLEST_HEIGHT
    assert heatmap(heatmap_answer([[0.5, "NaN"]])).layout.annotations[0].text == "1 cells are not finite"


def test_cells_have_six_digits_however_large_they_are():
    values = [[1.23456789e-12, -123456.789, 1.23456789e9, 0.0, 9.9999999]]
    sent = as_sent(heatmap(heatmap_answer(values, "half_ulp_margin")))["data"][0]["z"]
    assert sent == [[float(f"{value:.6g}") for value in values[0]]]
