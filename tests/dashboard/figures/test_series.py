"""Curves: names, gaps, bands, partial points, smoothing, axes."""

import pytest
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.series import SMALLEST_SPAN, mark_steps, smooth

from tests.dashboard.figures.answers import series

RED, BLUE = "#D55E00", "#0072B2"


def of_one(answer, **more):
    """The figure of one run's curve."""
    return curves(answer.metric, [NamedCurve("run", RED, answer)], **more)


def drawn(figure, name="run"):
    return next(trace for trace in figure.to_dict()["data"] if trace["name"] == name)


def texts(figure):
    """What stands on the figure."""
    return [note.text for note in figure.layout.annotations]


def ends(metric, values, **more):
    """The ends of the axis that are set for the figure of these values."""
    options = of_one(series(values, metric), **more).layout.yaxis.autorangeoptions
    return options.clipmin, options.clipmax


def test_the_figure_of_one_curve():
    figure = of_one(series([1.0, 2.0], "grad_norm")).to_dict()
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
    assert of_one(series([1.0], "loss", axis="tokens")).layout.xaxis.title.text == "tokens"


def test_several_runs_have_their_names_as_they_are_and_the_page_a_legend():
    lines = [NamedCurve('<a href="x">&', RED, series([0.9])), NamedCurve("plus", BLUE, series([1.0]), "dash")]
    figure = curves("edq_ratio", lines).to_dict()
    names = ['&lt;a href="x"&gt;&amp;', "plus"]
    assert [trace["name"] for trace in figure["data"]] == names, "never read as markup"
    assert [trace["line"]["color"] for trace in figure["data"]] == [RED, BLUE]
    assert figure["layout"]["showlegend"] is False


def test_undefined_and_non_finite_values_are_gaps_and_the_latter_are_counted():
    figure = of_one(series([1.0, None, "NaN", "Infinity", 2.0], "loss"))
    assert list(drawn(figure)["y"]) == [1.0, None, None, None, 2.0]
    assert texts(figure)[0] == "2 points are not finite, the first at step 30"
    merged = series([1.0, "NaN"], "loss", first_steps=[1, 11])
    assert texts(of_one(merged))[0] == "1 points are not finite, the first at step 11"


def test_a_band_follows_the_interval_and_breaks_at_a_gap():
    answer = series([0.9, 0.8, None, 0.7], low=[0.8, 0.7, None, 0.6], high=[1.0, 0.9, None, 0.8])
    band = drawn(of_one(answer), "run, 95 % interval")
    assert list(band["x"]) == [10, 20, 20, 10, 10, None, 40, 40, 40, None]
    assert list(band["y"]) == [0.8, 0.7, 0.9, 1.0, 0.8, None, 0.6, 0.8, 0.6, None]
    assert band["fill"] == "toself"
    torn = series([0.9, 0.8, 0.7], low=[0.8, 0.7, 0.6], high=[1.0, 0.9, 0.8], ranks=[2, 2, 1], world_size=2)
    assert 30 not in drawn(of_one(torn), "run, 95 % interval")["x"]


def test_a_partial_point_is_no_part_of_the_line():
    figure = of_one(series([0.9, 0.5, 0.8], ranks=[2, 1, 2], world_size=2))
    assert list(drawn(figure)["y"]) == [0.9, None, 0.8]
    torn = drawn(figure, "run (partial)")
    assert list(torn["y"]) == [None, 0.5, None]
    assert torn["marker"]["symbol"] == "circle-open"


def test_a_long_curve_marks_only_points_without_a_neighbour():
    values = [1.0] * 30 + [None, 2.0, None] + [1.0] * 30
    sizes = drawn(of_one(series(values, "grad_norm")))["marker"]["size"]
    assert sizes[31] == 5.0
    assert list(sizes[:30]) == [0.0] * 30


def test_smoothing_is_for_dense_logged_scalars_only():
    def names(metric, values):
        return [trace.name for trace in of_one(series(values, metric), smoothing=0.5).data]

    assert names("loss", [4.0, 2.0] * 20) == ["run, not smoothed", "run"]
    assert names("validation_loss", [4.0, 2.0]) == ["run"]
    assert names("edq_ratio", [4.0, 2.0] * 20) == ["run"]
    assert names("learning_rate", [4.0, 2.0] * 20) == ["run"], "it has no noise: a mean bends it"


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
    low, high = of_one(series([0.99999, 1.00001])).layout.yaxis.autorangeoptions.include
    assert high - low == pytest.approx(SMALLEST_SPAN)
    assert low < 0.99999 < 1.00001 < high
    assert of_one(series([0.5, 1.0])).layout.yaxis.autorangeoptions.include is None


def test_a_curve_that_never_changes_stands_on_an_axis_of_its_own_size():
    assert ends("learning_rate", [2e-4, 2e-4]) == pytest.approx((1e-4, 3e-4))
    assert ends("half_ulp_margin", [-2.0]) == (-3.0, -1.0)
    assert ends("lost_update_ratio", [0.0, None]) == pytest.approx((-5 * SMALLEST_SPAN, 95 * SMALLEST_SPAN))
    assert ends("learning_rate", [2e-4, 1e-4]) == ends("loss", [0.0]) == (None, None)


def test_a_fixed_scale_is_the_same_for_every_run_unless_a_value_lies_beyond_it():
    for low in (0.99, 0.16):
        assert ends("edq_ratio", [low, 1.0], is_fixed=True) == (0.0, 1.1)
    assert ends("edq_ratio", [-0.5, 1.0], is_fixed=True) == (-0.5, 1.1)
    for high in (0.0, 0.88):
        assert ends("lost_update_ratio", [0.0, high], is_fixed=True) == (0.0, 100.0)
    assert ends("loss", [2.0, 3.0], is_fixed=True) == (None, None)


def test_the_ideal_is_a_dotted_line_where_there_is_one():
    assert of_one(series([0.9])).layout.shapes[0].y0 == 1.0
    assert not of_one(series([0.9], "grad_norm")).layout.shapes


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
    figure = of_one(series(values, metric))
    assert not figure.data
    assert words in texts(figure)[0]


def test_a_live_update_keeps_the_zoom_and_another_metric_does_not():
    asked = (("loss", [1.0]), ("loss", [1.0, 2.0]), ("validation_loss", [1.0]))
    first, live, other = (of_one(series(values, metric)).layout.uirevision for metric, values in asked)
    assert first == live != other


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (series([1.0], "loss", axis="tokens"), "1.000, step 10"),
        (series([0.9], low=[0.8], high=[1.0]), "0.900 (95 %: 0.800 … 1.000)"),
        (
            series([0.9], first_steps=[1], minimum=[0.5], maximum=[1.0]),
            "0.900, steps 1–10, single ones 0.500 … 1.000",
        ),
    ],
)
def test_hover_says_what_the_axis_does_not(answer, text):
    assert list(drawn(of_one(answer))["customdata"]) == [text]


def test_marked_steps_are_named_above_the_curve_once_a_step():
    plain = of_one(series([1.0, 2.0], "loss"))
    top = plain.layout.margin.t
    marked = mark_steps(plain, [(1, "beyond the threshold"), (1, "fired"), (2, "changed")])
    found = [(note.text, note.y, note.yanchor) for note in marked.layout.annotations]
    assert found == [("beyond the threshold, fired at 1", 1, "bottom"), ("changed at 2", 1, "bottom")]
    assert len({note.yshift for note in marked.layout.annotations}) == 2
    assert marked.layout.margin.t >= top + 32


@pytest.mark.parametrize("key", ["loss", "edq_ratio"])
def test_the_numbers_of_every_axis_have_their_thousands_apart(key):
    layout = of_one(series([1.0, 2.0], key)).layout
    axes = [layout[name] for name in layout if name.startswith(("xaxis", "yaxis"))]
    assert [axis.separatethousands for axis in axes] == [True, True]


@pytest.mark.parametrize(("values", "kind", "shapes"), [([0.1, 0.0], "log", 0), ([0.0, 0.0], None, 1)])
def test_a_logarithm_needs_a_number_above_0_and_shows_no_ideal_of_0(values, kind, shapes):
    layout = of_one(series(values, "lost_update_ratio"), scale="log").layout
    assert (layout.yaxis.type, len(layout.shapes)) == (kind, shapes)
