"""Where things stand on a page that may still be loading, and what a mouse does there."""

from io import BytesIO

import numpy as np
from PIL import Image

from tests.waiting import until

__all__ = ["boxes", "downloaded_picture", "drag"]

NOT_IN_A_PICTURE = """.crumbs, .pandas { display: none } #run-panel { min-height: 0 !important }
    .page { padding-bottom: 16px !important }"""
"""What a page's picture leaves out, and its room."""


def boxes(*locators):
    """The boxes of all of them at one moment: read one after another, a page that still loads moves them apart."""

    def at_one_moment():
        elements = [locator.element_handle() for locator in locators]
        found = locators[0].page.evaluate(
            "elements => elements.map(element => element.isConnected && element.getBoundingClientRect().toJSON())",
            elements,
        )
        return all(found) and found

    return until(at_one_moment, "all of them on the page at once")


def drag(area, begin, end):
    """Drag from one place of the area to another, once it stands still: shares (of its width, of its height)."""
    page, box = area.page, area.bounding_box()
    area.hover(position={"x": box["width"] * begin[0], "y": box["height"] * begin[1]})
    page.mouse.down()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] * end[0], box["y"] + box["height"] * end[1], steps=5)
    page.mouse.up()


def downloaded_picture(page, *parts):
    """The name of the page's picture, which shows each of the parts as the page does, in twice as many pixels."""
    with page.expect_download() as found:
        page.get_by_role("button", name="Download picture").press("Enter")
    style = page.add_style_tag(content=NOT_IN_A_PICTURE)
    with Image.open(BytesIO(page.locator("#page").screenshot(animations="disabled"))) as shown:
        seen = np.asarray(shown.convert("RGB"), dtype=float)
    frame, *places = boxes(page.locator("#page"), *map(page.locator, parts))
    style.evaluate("style => style.remove()")
    with Image.open(found.value.path()) as picture:
        assert (picture.format, picture.size) == ("PNG", (2 * seen.shape[1], 2 * seen.shape[0]))
        drawn = np.asarray(picture.convert("RGB").resize(seen.shape[1::-1], Image.Resampling.BOX), dtype=float)
    for box in places:
        left, top = round(box["x"] - frame["x"]), round(box["y"] - frame["y"])
        place = np.s_[top : top + round(box["height"]), left : left + round(box["width"])]
        assert np.ptp(drawn[place]) > 60, "not blank"
        assert (
            np.abs(drawn[place] - seen[place]).mean() < 0.2 * np.abs(seen[place] - np.median(seen[place])).mean()
        ), box
    return found.value.suggested_filename
