"""The README on a package index: no link is left that leads beside it."""

import re
import tomllib

import pytest

from tests.docs.blocks import DOCS
from tools.package_page import index_page

README = (DOCS.parent / "README.md").read_text()
RELATIVE = re.compile(r"\]\((?!https://|#)[^)]*\)")


@pytest.mark.parametrize("repository", [None, "https://forge.example/team/collage-monitor/"])
def test_no_relative_link_is_left(repository):
    assert len(RELATIVE.findall(README)) > 30
    page = index_page(README, repository)
    assert not RELATIVE.findall(page)
    assert page.count("```") == README.count("```")
    assert ("docs/tour.md" in page) is (repository is not None)


def test_links_and_pictures_lead_to_the_repository():
    page = index_page(
        "![A](docs/a.png) [tour](docs/tour.md#x), [paper](https://arxiv.org/abs/1)", "https://f.example/p"
    )
    assert page == (
        "![A](https://f.example/p/raw/HEAD/docs/a.png) [tour](https://f.example/p/blob/HEAD/docs/tour.md#x), "
        "[paper](https://arxiv.org/abs/1)"
    )
    assert index_page("![A](docs/a.png)See [the *tour*](docs/tour.md).", None) == "See the *tour*."


def test_the_build_makes_it():
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    assert "readme" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["metadata"]["hooks"]["custom"] == {}
