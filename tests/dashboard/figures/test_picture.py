"""A figure as SVG: values stand where its scale says, gaps stay gaps, and nothing of a name is markup."""

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from collage_dashboard.figures import NamedCurve, curves, heatmap, picture, update_histogram
from collage_dashboard.figures.series import mark_events, shade_beyond
from collage_dashboard.figures.style import DASHES, empty_figure, stepped
from PIL import Image

from collage_monitor.alerts import ALERTS
from tests.dashboard.figures.answers import heatmap_answer, histogram_answer, series

WIDTH = 600.0


def drawn(figure):
    """The parts of the picture by their tags; text that is no XML is an error."""
    root = ElementTree.fromstring(picture(figure, "a <chart>", WIDTH))
    assert root.get("aria-label") == "a <chart>"
    return {tag: list(root.iter(tag)) for tag in ("path", "circle", "text", "rect", "line", "image")}


def labels(parts, anchor):
    """Numbers of a scale, with where they stand."""
    found = [text for text in parts["text"] if text.get("text-anchor") == anchor]
    numbers = [text for text in found if re.fullmatch(r"[\d.,]+", text.text or "")]
    return {text.text: (float(text.get("x")), float(text.get("y"))) for text in numbers}


def test_points_stand_where_the_scales_say_and_a_gap_divides_the_line():
    values = [1.0, 2.0, None, 4.0, 3.0]
    parts = drawn(curves("loss", [NamedCurve("a", "#000000", series(values, "loss"))]))
    points = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in parts["circle"]]
    across, up = labels(parts, "middle"), labels(parts, "end")
    assert {"10", "50"} <= set(across)
    for (x, y), step, value in zip(points, (10, 20, 40, 50), (1, 2, 4, 3), strict=True):
        assert x == pytest.approx(across[f"{step}"][0], abs=0.2)
        assert y == pytest.approx(up[f"{value}"][1] - 4, abs=0.2)
    [path] = parts["path"]
    assert [path.get("d").count(sign) for sign in "ML"] == [2, 2]


def test_a_logarithmic_scale_has_powers_and_leaves_out_what_has_none():
    line = NamedCurve("a", "#000000", series([1e-3, 0.0, 1.0], "loss"))
    parts = drawn(curves("loss", [line], scale="log"))
    assert len(parts["circle"]) == 2
    heights = {"".join(text.itertext()): float(text.get("y")) for text in parts["text"]}
    assert heights["10-1"] == pytest.approx((heights["100"] + heights["10-2"]) / 2, abs=0.2)


def test_names_are_text_and_marks_and_bounds_are_drawn():
    figure = curves("edq_ratio", [NamedCurve("<script>&", "#000000", series([1.0, 0.5]), DASHES[1])])
    condition, *_ = ALERTS["CollageEdqLow"].drawn
    figure = mark_events(shade_beyond(figure, condition), [(20, "<b>resumed")])
    parts = drawn(figure)
    assert parts["path"][0].get("stroke-dasharray") == "6 4"
    assert len(parts["rect"]) == 1
    assert "<b>resumed" in ElementTree.tostring(parts["text"][-1], encoding="unicode", method="text")
    said = drawn(empty_figure("nothing of <img> yet"))["text"]
    assert [text.text for text in said] == ["nothing of <img> yet"]


def test_a_heatmaps_cells_have_the_colours_of_the_scale():
    answer = heatmap_answer([[0.0, 1.0], [None, 0.5]], "lost_update_ratio")
    cells, scale = drawn(heatmap(answer))["image"]
    with Image.open(io.BytesIO(base64.b64decode(cells.get("href").partition(",")[2]))) as image:
        pixels = np.asarray(image)
    assert pixels.shape[0] == 2
    ends = [tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for _, colour in stepped(0.25)["light"]]
    assert tuple(pixels[0, 0, :3]) == ends[0]
    assert tuple(pixels[0, -1, :3]) == ends[-1]
    assert [pixels[1, at, 3] for at in (0, -1)] == [0, 255], "a cell without a value is empty"
    assert scale.get("width") == "10.0"


def test_a_bar_reaches_from_nothing_to_its_share_and_says_it():
    parts = drawn(update_histogram(histogram_answer({"-3": 30.0, "0": 60.0})))
    heights = {rect.get("fill"): float(rect.get("height")) for rect in parts["rect"] if float(rect.get("height"))}
    below, above = heights.values()
    assert above == pytest.approx(2 * below, abs=0.2)
    told = [rect[0].text for rect in parts["rect"] if "33.3" in rect[0].text]
    assert told == ["2^\u22123 to 2^\u22122 gaps, 33.3 % of the updates, 30 elements"]
