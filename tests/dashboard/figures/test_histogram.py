"""The histogram of updates against the grid: shares, the half gap, the edges."""

from collage_dashboard.figures import update_histogram
from collage_dashboard.figures.style import ACCENT, BELOW

from tests.dashboard.figures.answers import histogram_answer


def bar(figure, octave):
    trace = figure.data[0]
    place = list(trace.x).index(octave + 0.5)
    return trace.y[place], trace.marker.color[place], trace.customdata[place]


def test_shares_stand_at_their_octaves_and_add_to_one():
    figure = update_histogram(histogram_answer({"-3": 30.0, "0": 60.0, "overflow": 10.0}))
    assert bar(figure, -3)[0] == 30
    assert bar(figure, 0)[0] == 60
    assert bar(figure, 8)[0] == 10
    assert abs(sum(figure.data[0].y) - 100) < 1e-9


def test_half_a_gap_parts_what_plain_storage_loses():
    figure = update_histogram(histogram_answer({"-2": 1.0, "-1": 1.0}))
    assert figure.layout.shapes[0].x0 == figure.layout.shapes[0].x1 == -1.0
    assert bar(figure, -2)[1] == BELOW
    assert bar(figure, -1)[1] == ACCENT


def test_hover_names_the_octave_the_share_and_the_elements():
    text = bar(update_histogram(histogram_answer({"-2": 1000.0, "underflow": 3000.0})), -2)[2]
    assert text == "2<sup>−2</sup> to 2<sup>−1</sup> gaps<br>25.0 % of the updates<br>1,000 elements"
    assert bar(update_histogram(histogram_answer({"underflow": 1.0})), -25)[2].startswith("below 2<sup>−24</sup>")


def test_an_empty_histogram_says_so():
    assert not update_histogram(histogram_answer({})).data


def test_the_outline_of_an_earlier_time_has_its_own_shares():
    now, before = histogram_answer({"-3": 30.0, "0": 10.0}), histogram_answer({"-3": 2.0, "0": 6.0})
    outline = update_histogram(now, before=before).data[1]
    assert outline.y[list(outline.x).index(-2.5)] == 25.0
    assert sum(outline.y) == 100.0
