"""Where things stand on a page that may still be loading, and what a mouse does there."""

from tests.waiting import until

__all__ = ["boxes", "drag"]


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
