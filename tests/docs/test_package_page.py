"""The README on a package index: no link is left that leads beside it."""

import re
import shutil
import tomllib

import pytest
import yaml

from collage_monitor import __version__
from tests.docs.blocks import DOCS
from tools import addresses
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
    paper = citation["preferred-citation"]
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    fields = dict(re.findall(r"(\w+) = \{(.*)\}", (DOCS / "index.md").read_text()))
    assert (fields["title"], fields["author"], fields["year"]) == (paper["title"], authors, str(paper["year"]))
    assert paper["identifiers"][0]["value"] == f"{fields['archiveprefix']}:{fields['eprint']}" == "arXiv:2405.03637"


PLACES = [*addresses.DISTRIBUTIONS, "CITATION.cff", "CODE_OF_CONDUCT.md", "docs/how-to/long-jobs.md"]


def test_one_command_fills_in_every_address(tmp_path):
    for name in PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCS.parent / name, tmp_path / name)
    if (DOCS.parent / "CODE_OF_CONDUCT.md").read_text().count("CONTACT"):
        assert addresses.lacking(tmp_path) == PLACES
    addresses.write(tmp_path, "https://old.example/a/b", "https://old.example/site", "old@team.example")
    addresses.write(tmp_path, "https://forge.example/team/name/", "https://team.example/name", "us@team.example")
    assert addresses.lacking(tmp_path) == []
    for name in addresses.DISTRIBUTIONS:
        assert tomllib.loads((tmp_path / name).read_text())["project"]["urls"] == {
            "Documentation": "https://team.example/name/",
            "Repository": "https://forge.example/team/name",
            "Issues": "https://forge.example/team/name/issues",
            "Changelog": "https://forge.example/team/name/blob/HEAD/CHANGELOG.md",
            "Paper": "https://arxiv.org/abs/2405.03637",
        }
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["url"] == "https://team.example/name/"
    assert "write to us@team.example." in (tmp_path / "CODE_OF_CONDUCT.md").read_text()
    page = (tmp_path / "docs/how-to/long-jobs.md").read_text()
    assert "uses: team/name@v0.1.0" in page
    assert "repo: https://forge.example/team/name\n" in page
    assert not any("old." in (tmp_path / name).read_text() for name in PLACES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("http://f.example/p", "https://s.example/", "a@b.example"), "'http://f.example/p' is no address"),
        (("https://f.example/p", "https://s.example/", "us"), "'us' is no mail address"),
    ],
)
def test_a_wrong_address_is_refused_before_anything_is_written(given, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        addresses.write(tmp_path, *given)


def test_a_release_is_signed_lists_what_it_brings_and_has_addresses():
    jobs = yaml.safe_load((DOCS.parent / ".github/workflows/release.yml").read_text())["jobs"]
    told = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert told.index("python -m tools.addresses") < told.index("make release") < told.index("make sbom")
    (upload,) = [step for step in jobs["publish"]["steps"] if "gh-action-pypi-publish" in step["uses"]]
    assert upload["with"]["attestations"] is True
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert re.fullmatch(r"pypa/gh-action-pypi-publish@[0-9a-f]{40}", upload["uses"])
