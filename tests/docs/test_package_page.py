"""The README on a package index: no link is left that leads beside it."""

import re
import tomllib

import pytest
import yaml

from collage_monitor import __version__
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


@pytest.mark.parametrize("folder", ["agent", "server"])
def test_the_other_pages_stand_alone(folder):
    """Nothing lies beside them on an index: they have no links within the repository, and say what to install."""
    text = (DOCS.parent / folder / "README.md").read_text()
    project = tomllib.loads((DOCS.parent / folder / "pyproject.toml").read_text())["project"]
    assert project["readme"] == "README.md"
    assert index_page(text, None) == text
    assert f"pip install {project['name']}" in text
    assert len(text.split()) < 600, "a page"


@pytest.mark.parametrize("folder", ["agent", "server"])
def test_each_distribution_carries_the_licence(folder):
    assert (DOCS.parent / folder / "LICENSE").read_bytes() == (DOCS.parent / "LICENSE").read_bytes()


def test_who_cites_the_software_is_given_its_version_and_the_paper():
    citation = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["preferred-citation"]["identifiers"][0]["value"] == "arXiv:2405.03637"
