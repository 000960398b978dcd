"""The histogram of updates against the grid, and the five classes of elements, stacked: shares of all."""

from collage_dashboard.figures import class_shares, update_histogram
from collage_dashboard.figures.histogram import CLASSES
from collage_dashboard.figures.style import ACCENT, BELOW

from tests.dashboard.figures.answers import histogram_answer, series


def bar(figure, octave):
    trace = figure.data[0]
    place = list(trace.x).index(octave + 0.5)
    return trace.y[place], trace.marker.color[place], trace.customdata[place]


def test_shares_stand_at_their_octaves_add_to_one_and_are_told_on_hover():
    figure = update_histogram(histogram_answer({"-3": 30.0, "0": 60.0, "overflow": 10.0}))
    assert [bar(figure, octave)[0] for octave in (-3, 0, 8)] == [30, 60, 10]
    assert abs(sum(figure.data[0].y) - 100) < 1e-9
    text = bar(update_histogram(histogram_answer({"-2": 1000.0, "underflow": 3000.0})), -2)[2]
    assert text == "2<sup>−2</sup> to 2<sup>−1</sup> gaps<br>25.0 % of the updates<br>1,000 elements"
    assert bar(update_histogram(histogram_answer({"underflow": 1.0})), -25)[2].startswith("below 2<sup>−24</sup>")


def test_half_a_gap_parts_what_plain_storage_loses():
    figure = update_histogram(histogram_answer({"-2": 1.0, "-1": 1.0}))
    assert figure.layout.shapes[0].x0 == figure.layout.shapes[0].x1 == -1.0
    assert bar(figure, -2)[1] == BELOW
    assert bar(figure, -1)[1] == ACCENT


def test_the_outline_of_an_earlier_time_has_its_own_shares_and_nothing_has_none():
    now, before = histogram_answer({"-3": 30.0, "0": 10.0}), histogram_answer({"-3": 2.0, "0": 6.0})
    outline = update_histogram(now, before=before).data[1]
    assert outline.y[list(outline.x).index(-2.5)] == 25.0
    assert sum(outline.y) == 100.0
    assert not update_histogram(histogram_answer({})).data


COUNTS = {"faithful": 50.0, "distorted": 10.0, "lost": 20.0, "idle": 15.0, "nonfinite": 5.0}


def test_shares_add_up_to_all():
    figure = class_shares({name: series([value, 2 * value], name) for name, value in COUNTS.items()})
    assert [trace.name for trace in figure.data] == list(CLASSES)
    assert [trace.y[0] for trace in figure.data] == [50, 10, 20, 15, 5]
    assert all(abs(sum(trace.y[point] for trace in figure.data) - 100) < 1e-9 for point in (0, 1))
    assert {trace.stackgroup for trace in figure.data} == {"classes"}


def test_a_point_with_an_unknown_class_is_left_out_and_without_all_five_there_is_no_figure():
    answers = {name: series([value, value], name) for name, value in COUNTS.items()}
    answers["lost"] = series([20.0, None], "lost")
    assert [len(trace.x) for trace in class_shares(answers).data] == [1] * 5

    assert not class_shares({"lost": series([1.0], "lost")}).data
    assert not class_shares({name: series([], name) for name in CLASSES}).data
