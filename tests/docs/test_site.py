"""The site: every page is in its navigation once; it builds without a warning and asks nothing of other hosts."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]


def pages(entry):
    """The files of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages(value)]


def test_the_navigation_has_every_page_once_and_four_kinds():
    named = pages(SITE["nav"])
    there = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(named) == there
    kinds = [next(iter(entry)) for entry in SITE["nav"]]
    assert kinds == ["Start", "Tutorials", "How to", "Explanation", "Reference"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The pages of the site, built as `make check` builds them."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    (folder / "docs" / "demo.html").write_text("a report")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return sorted((folder / "site").rglob("*.html"))


@pytest.mark.nightly
def test_the_site_asks_no_other_host(built):
    assert len(built) > 60
    for page in built:
        text = page.read_text()
        for element in (
            r"(?:script|img|iframe)[^>]+src",
            r'link[^>]+rel="?(?:stylesheet|preconnect|icon)[^>]+href',
        ):
            assert not re.findall(rf"""<{element}="?(?:https?:)?//[^" >]+""", text), page


@pytest.mark.slow
def test_the_search_finds_a_message_by_its_words_and_the_first_page_leads_to_the_demos_report(built):
    """`python -m tools.static_demo` makes the report before the site is built."""
    site = built[0].parent
    index = json.loads((site / "search.json").read_text())
    found = {item["location"] for item in index["items"] if "asks for a token: set COLLAGE_TOKEN" in item["text"]}
    assert found == {"troubleshooting/#a-token-is-missing-unknown-or-not-allowed-to-do-this"}
    assert (site / "demo.html").read_text() == "a report"
    assert '<a href="demo.html">' in (site / "index.html").read_text()
    workflow = (ROOT / ".github/workflows/docs.yml").read_text()
    assert workflow.index("tools.static_demo") < workflow.index("zensical build")
