"""Curves: names, gaps, bands, partial points, smoothing, axes."""

import msgspec
import pytest
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.series import SMALLEST_SPAN, mark_steps, smooth

from tests.dashboard.figures.answers import series

RED, BLUE = "#D55E00", "#0072B2"


def drawn(figure, name):
    return next(trace for trace in figure.to_dict()["data"] if trace["name"] == name)


def test_the_figure_of_one_curve():
    figure = curves("grad_norm", [NamedCurve("run", RED, series([1.0, 2.0], "grad_norm"))]).to_dict()
    assert figure["data"] == [
        {
            "type": "scatter",
            "x": [10.0, 20.0],
            "y": [1.0, 2.0],
            "name": "run",
            "legendgroup": "run",
            "mode": "lines+markers",
            "line": {"color": RED, "width": 1.8, "dash": "solid"},
            "marker": {"size": [5.0, 5.0]},
            "connectgaps": False,
            "customdata": ["1.000", "2.000"],
            "hovertemplate": "%{customdata}",
        }
    ]
    assert figure["layout"]["xaxis"]["title"]["text"] == "step"
    assert figure["layout"]["yaxis"]["title"]["text"] == "Gradient norm (gradient)"
    assert figure["layout"]["showlegend"] is False


def test_several_runs_have_their_names_and_the_page_a_legend():
    lines = [NamedCurve("plain", RED, series([0.9])), NamedCurve("plus", BLUE, series([1.0]), "dash")]
    figure = curves("edq_ratio", lines).to_dict()
    assert [trace["name"] for trace in figure["data"]] == ["plain", "plus"]
    assert [trace["line"]["color"] for trace in figure["data"]] == [RED, BLUE]
    assert figure["layout"]["showlegend"] is False


def test_undefined_and_non_finite_values_are_gaps_and_the_latter_are_counted():
    figure = curves("loss", [NamedCurve("run", RED, series([1.0, None, "NaN", "Infinity", 2.0], "loss"))])
    assert list(drawn(figure, "run")["y"]) == [1.0, None, None, None, 2.0]
    assert figure.layout.annotations[0].text == "2 points are not finite, the first at step 30"
    merged = msgspec.structs.replace(series([1.0, "NaN"], "loss"), first_steps=[1, 11])
    figure = curves("loss", [NamedCurve("run", RED, merged)])
    assert figure.layout.annotations[0].text == "1 points are not finite, the first at step 11"


def test_a_band_follows_the_interval_and_breaks_at_a_gap():
    answer = series([0.9, 0.8, None, 0.7], low=[0.8, 0.7, None, 0.6], high=[1.0, 0.9, None, 0.8])
    band = drawn(curves("edq_ratio", [NamedCurve("run", RED, answer)]), "run, 95 % interval")
    assert list(band["x"]) == [10, 20, 20, 10, 10, None, 40, 40, 40, None]
    assert list(band["y"]) == [0.8, 0.7, 0.9, 1.0, 0.8, None, 0.6, 0.8, 0.6, None]
    assert band["fill"] == "toself"
    torn = series([0.9, 0.8, 0.7], low=[0.8, 0.7, 0.6], high=[1.0, 0.9, 0.8], ranks=[2, 2, 1], world_size=2)
    assert 30 not in drawn(curves("edq_ratio", [NamedCurve("run", RED, torn)]), "run, 95 % interval")["x"]


def test_a_partial_point_is_no_part_of_the_line():
    answer = series([0.9, 0.5, 0.8], ranks=[2, 1, 2], world_size=2)
    figure = curves("edq_ratio", [NamedCurve("run", RED, answer)])
    assert list(drawn(figure, "run")["y"]) == [0.9, None, 0.8]
    torn = drawn(figure, "run (partial)")
    assert list(torn["y"]) == [None, 0.5, None]
    assert torn["marker"]["symbol"] == "circle-open"


def test_a_long_curve_marks_only_points_without_a_neighbour():
    values = [1.0] * 30 + [None, 2.0, None] + [1.0] * 30
    sizes = drawn(curves("grad_norm", [NamedCurve("run", RED, series(values, "grad_norm"))]), "run")["marker"][
        "size"
    ]
    assert sizes[31] == 5.0
    assert list(sizes[:30]) == [0.0] * 30


def test_smoothing_is_for_dense_logged_scalars_only():
    def names(metric, values):
        line = NamedCurve("run", RED, series(values, metric))
        return [trace.name for trace in curves(metric, [line], smoothing=0.5).data]

    assert names("loss", [4.0, 2.0] * 20) == ["run, not smoothed", "run"]
    assert names("validation_loss", [4.0, 2.0]) == ["run"]
    assert names("edq_ratio", [4.0, 2.0] * 20) == ["run"]
    assert names("learning_rate", [4.0, 2.0] * 20) == ["run"], "it has no noise: a mean bends it"


def test_a_name_is_shown_as_it_is_and_never_read_as_markup():
    lines = [NamedCurve('<a href="x">&', RED, series([0.9])), NamedCurve("b", BLUE, series([0.9]))]
    assert curves("edq_ratio", lines).data[0].name == '&lt;a href="x"&gt;&amp;'


def test_smooth_against_the_weighted_mean_written_out():
    values, weight = [3.0, None, 1.0, 5.0], 0.8
    defined = [value for value in values if value is not None]
    expected = []
    for end in range(1, len(defined) + 1):
        weights = [weight ** (end - 1 - place) for place in range(end)]
        expected.append(sum(w * v for w, v in zip(weights, defined, strict=False)) / sum(weights))
    smoothed = smooth(values, weight)
    assert smoothed[1] is None
    assert [value for value in smoothed if value is not None] == pytest.approx(expected, rel=1e-12)


def test_rounding_noise_does_not_fill_the_axis():
    figure = curves("edq_ratio", [NamedCurve("run", RED, series([0.99999, 1.00001]))])
    low, high = figure.layout.yaxis.autorangeoptions.include
    assert high - low == pytest.approx(SMALLEST_SPAN)
    assert low < 0.99999 < 1.00001 < high
    wide = curves("edq_ratio", [NamedCurve("run", RED, series([0.5, 1.0]))])
    assert wide.layout.yaxis.autorangeoptions.include is None


def test_a_curve_that_never_changes_stands_on_an_axis_of_its_own_size():
    def ends(metric, values):
        found = curves(metric, [NamedCurve("run", RED, series(values, metric))]).layout.yaxis.autorangeoptions
        return found.clipmin, found.clipmax

    assert ends("learning_rate", [2e-4, 2e-4]) == pytest.approx((1e-4, 3e-4))
    assert ends("half_ulp_margin", [-2.0]) == (-3.0, -1.0)
    assert ends("lost_update_ratio", [0.0, None]) == pytest.approx((-5 * SMALLEST_SPAN, 95 * SMALLEST_SPAN))
    assert ends("learning_rate", [2e-4, 1e-4]) == (None, None)
    assert ends("loss", [0.0]) == (None, None)


def test_a_fixed_scale_is_the_same_for_every_run_unless_a_value_lies_beyond_it():
    def ends(metric, values):
        lines = [NamedCurve("run", RED, series(values, metric))]
        found = curves(metric, lines, is_fixed=True).layout.yaxis.autorangeoptions
        return found.clipmin, found.clipmax

    assert ends("edq_ratio", [0.99, 1.0]) == ends("edq_ratio", [0.16, 1.0]) == (0.0, 1.1)
    assert ends("edq_ratio", [-0.5, 1.0]) == (-0.5, 1.1)
    assert ends("lost_update_ratio", [0.0]) == ends("lost_update_ratio", [0.0, 0.88]) == (0.0, 100.0)
    assert ends("loss", [2.0, 3.0]) == (None, None)


def test_the_ideal_is_a_dotted_line_where_there_is_one():
    assert curves("edq_ratio", [NamedCurve("run", RED, series([0.9]))]).layout.shapes[0].y0 == 1.0
    assert not curves("grad_norm", [NamedCurve("run", RED, series([0.9], "grad_norm"))]).layout.shapes


@pytest.mark.parametrize(
    ("metric", "values", "words"),
    [
        ("edq_ratio", [None, None], "undefined"),
        ("edq_ratio", [], "no measured step"),
        ("validation_loss", [], "collage_agent.log"),
        ("edq_oracle_ratio", [], "oracle=True"),
    ],
)
def test_an_empty_figure_says_why(metric, values, words):
    figure = curves(metric, [NamedCurve("run", RED, series(values, metric))])
    assert not figure.data
    assert words in figure.layout.annotations[0].text


def test_a_live_update_keeps_the_zoom_and_another_metric_does_not():
    def revision(metric, values):
        return curves(metric, [NamedCurve("run", RED, series(values, metric))]).layout.uirevision

    assert revision("loss", [1.0]) == revision("loss", [1.0, 2.0])
    assert revision("loss", [1.0]) != revision("validation_loss", [1.0])


def test_hover_says_what_the_axis_does_not():
    def texts(answer):
        return list(drawn(curves(answer.metric, [NamedCurve("run", RED, answer)]), "run")["customdata"])

    assert texts(series([1.0], "loss", axis="tokens")) == ["1.000, step 10"]
    assert texts(series([0.9], low=[0.8], high=[1.0])) == ["0.900 (95 %: 0.800 … 1.000)"]
    merged = msgspec.structs.replace(series([0.9]), first_steps=[1], minimum=[0.5], maximum=[1.0])
    assert texts(merged) == ["0.900, steps 1–10, single ones 0.500 … 1.000"]


def test_positions_and_title_follow_the_axis():
    figure = curves("loss", [NamedCurve("run", RED, series([1.0], "loss", axis="tokens"))])
    assert figure.layout.xaxis.title.text == "tokens"


def test_marked_steps_are_named_above_the_curve_once_a_step():
    plain = curves("loss", [NamedCurve("run", RED, series([1.0, 2.0], "loss"))])
    top = plain.layout.margin.t
    marked = mark_steps(plain, [(1, "beyond the threshold"), (1, "fired"), (2, "changed")])
    found = [(note.text, note.y, note.yanchor) for note in marked.layout.annotations]
    assert found == [("beyond the threshold, fired at 1", 1, "bottom"), ("changed at 2", 1, "bottom")]
    assert len({note.yshift for note in marked.layout.annotations}) == 2
    assert marked.layout.margin.t >= top + 32


@pytest.mark.parametrize("key", ["loss", "edq_ratio"])
def test_the_numbers_of_every_axis_have_their_thousands_apart(key):
    figure = curves(key, [NamedCurve("run", RED, series([1.0, 2.0], key))])
    axes = [figure.layout[name] for name in figure.layout if name.startswith(("xaxis", "yaxis"))]
    assert len(axes) == 2
    assert all(axis.separatethousands for axis in axes)


def test_a_logarithm_needs_a_number_above_0_and_shows_no_ideal_of_0():
    def drawn_over(values):
        figure = curves(
            "lost_update_ratio", [NamedCurve("run", RED, series(values, "lost_update_ratio"))], scale="log"
        )
        return figure.layout.yaxis.type, len(figure.layout.shapes)

    assert drawn_over([0.1, 0.0]) == ("log", 0)
    assert drawn_over([0.0, 0.0]) == (None, 1)
