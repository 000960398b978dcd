"""The five classes, stacked: they add up to one at every point."""

from collage_dashboard.figures import class_shares
from collage_dashboard.figures.histogram import CLASSES

from tests.dashboard.figures.answers import series

COUNTS = {"faithful": 50.0, "distorted": 10.0, "lost": 20.0, "idle": 15.0, "nonfinite": 5.0}


def test_shares_add_up_to_all():
    figure = class_shares({name: series([value, 2 * value], name) for name, value in COUNTS.items()})
    assert [trace.name for trace in figure.data] == list(CLASSES)
    assert [trace.y[0] for trace in figure.data] == [50, 10, 20, 15, 5]
    assert all(abs(sum(trace.y[point] for trace in figure.data) - 100) < 1e-9 for point in (0, 1))
    assert {trace.stackgroup for trace in figure.data} == {"classes"}


def test_a_point_with_an_unknown_class_is_left_out():
    answers = {name: series([value, value], name) for name, value in COUNTS.items()}
    answers["lost"] = series([20.0, None], "lost")
    assert [len(trace.x) for trace in class_shares(answers).data] == [1] * 5


def test_without_all_five_there_is_no_figure():
    assert not class_shares({"lost": series([1.0], "lost")}).data
    assert not class_shares({name: series([], name) for name in CLASSES}).data
