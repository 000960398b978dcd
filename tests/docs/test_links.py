"""Links between pages lead to files and headings that exist; those of the site stay within the site."""

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
