"""Of a figure that a page shows already, only what is new travels, and put in its place it gives the new figure."""

import json

import pytest
from collage_dashboard.figures import NamedCurve, curves, heatmap
from collage_dashboard.figures.growth import newest_part

from tests.dashboard.figures.answers import heatmap_answer, series

VALUES = [1.0 - 0.004 * place + 0.001 * (place % 7) for place in range(60)]


def drawn(points, *, values=VALUES, **more):
    return curves("edq_ratio", [NamedCurve("a run", "#0072B2", series(values[:points], **more))])


def banded(points, gap=()):
    low = [None if place in gap else value - 0.01 for place, value in enumerate(VALUES)]
    high = [None if place in gap else value + 0.01 for place, value in enumerate(VALUES)]
    return drawn(points, low=low[:points], high=high[:points])


def put(figure, part):
    """As `assets/figures.js` does it."""
    shown = json.loads(figure.to_json())
    for trace, (head, tail), newer in zip(shown["data"], part["ends"], part["traces"], strict=True):
        for name, values in newer.items():
            place = trace["marker"] if name == "size" else trace
            place[name] = [*place[name][:head], *values, *place[name][len(place[name]) - tail :]]
    return shown


def two(points):
    own = series(VALUES[:points], low=[0.5] * points, high=[1.0] * points)
    lines = [NamedCurve("a run", "#0072B2", own), NamedCurve("another", "#D55E00", series(VALUES[:points]))]
    return curves("edq_ratio", lines)


@pytest.mark.parametrize("make", [drawn, banded, lambda points: banded(points, {3, 17, 18}), two])
@pytest.mark.parametrize(("before", "after"), [(40, 41), (40, 47), (41, 60)])
def test_the_newest_points_put_in_their_place_give_the_new_figure(make, before, after):
    _, told = newest_part(make(before), None)
    part, then = newest_part(make(after), told)
    assert part is not None
    assert put(make(before), part) == json.loads(make(after).to_json())
    assert newest_part(make(after), None) == (None, then)
    assert newest_part(make(after), then)[1] == then, "what is shown already is known as such"
    assert len(json.dumps(part)) < 0.2 * len(make(after).to_json()) or after - before > 10


def test_a_point_that_has_changed_brings_the_whole_figure():
    _, told = newest_part(drawn(40), None)
    late = [0.9, *VALUES[1:]]
    assert newest_part(drawn(41, values=late), told)[0] is None
    newest = [*VALUES[:39], 0.9, *VALUES[40:]]
    assert newest_part(drawn(41, values=newest), told)[0] is not None, "the last one may have been incomplete"


def test_fewer_points_other_curves_and_another_scale_bring_the_whole_figure():
    _, told = newest_part(banded(40), None)
    for other in (banded(30), drawn(41), two(41)):
        assert newest_part(other, told)[0] is None


def test_of_a_heatmap_that_has_grown_only_the_newest_columns_are_sent():
    """Each tick of a live page sent all of it."""
    rows = [[1.0 - 0.01 * place * row for place in range(30)] for row in range(3)]
    short = heatmap(heatmap_answer([row[:28] for row in rows]))
    part, told = newest_part(short, None)
    assert part is None
    assert newest_part(short, told)[1] == told
    grown = heatmap(heatmap_answer(rows))
    part, after = newest_part(grown, told)
    assert part == {"from": 27, "x": [280, 290, 300], "z": [list(row[27:]) for row in grown.data[0].z]}
    assert after != told
    changed = heatmap(heatmap_answer([[0.5, *row[1:]] for row in rows]))
    assert newest_part(changed, told)[0] is None, "a late report changed what is there"
    chosen = heatmap(heatmap_answer(rows), selected="layer.1")
    assert newest_part(chosen, told)[0] is None, "another layer is marked"
