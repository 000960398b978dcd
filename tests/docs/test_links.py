"""Links between pages lead to files and headings that exist; the tour of the code names such files and rooms."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def anchors(page):
    """The anchors of a page's headings, as a site makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if page.is_relative_to(DOCS):
            assert target.is_relative_to(DOCS), f"{page.name} links to {link}, which the site does not have"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}"


TOUR = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|yml)|[a-z_]+/(?:[a-z_]+/)*)`", TOUR)
COMPONENTS = [ROOT / "collage_monitor", *(path for path in ROOT.glob("*/collage_*") if path.is_dir())]


def test_every_file_that_the_tour_names_exists_and_every_component_has_its_floor():
    assert len(NAMED) > 50
    missing = [name for name in NAMED if not any((root / name).exists() for root in [ROOT, *COMPONENTS])]
    assert not missing
    assert len(COMPONENTS) == 7
    for component in COMPONENTS:
        assert f"`{component.relative_to(ROOT)}/`" in TOUR


@pytest.mark.parametrize("component", ["agent/collage_agent", "server/collage_server"])
def test_every_room_has_an_owner(component):
    rooms = {path.parent.relative_to(ROOT / component) for path in (ROOT / component).glob("*/__init__.py")}
    rooms |= {path.parent.relative_to(ROOT / component) for path in (ROOT / component).glob("store/*/__init__.py")}
    assert not [room for room in rooms if f"`{room}/`" not in TOUR]
