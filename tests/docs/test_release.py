"""What is published: three wheels, typed, of which the optimizers stand alone, and a README whose links lead
somewhere on a package index and whose benchmarks are there."""

import re
import shutil
import sys
import tomllib
import venv

import pytest
import yaml

from benchmarks import _training, first_steps
from collage_monitor import __version__
from tests.docs.blocks import DOCS
from tests.forking import TORCH, run_forked
from tools import addresses
from tools.package_page import index_page
from tools.release import DISTRIBUTIONS, MISTYPED, OPTIMIZING, OURS, ROOT, TYPED, untyped


def _packages(folder):
    """The import packages that a distribution carries, as folders."""
    build = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    found = [ROOT / folder / package for package in build["targets"]["wheel"]["packages"]]
    # server/hatch_build.py adds it.
    return [*found, ROOT / "dashboard" / "collage_dashboard"] if folder == "server" else found


PACKAGES = [package for folder in DISTRIBUTIONS.values() for package in _packages(folder)]


def test_each_package_is_in_one_wheel_and_says_that_it_is_typed():
    assert sorted(package.name for package in PACKAGES) == sorted(OURS)
    assert [package for package in PACKAGES if not (package / "py.typed").is_file()] == []


@pytest.mark.slow
def test_the_optimizers_work_where_nothing_else_of_ours_is():
    """A training with them, and what their page shows; contract and agent cannot be imported there."""
    (page,) = re.findall(r"```python\n(.*?)```", (ROOT / "agent" / "README.md").read_text(), re.DOTALL)
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in OURS if name != "collage_optim")
    code = f"import sys\n{blocked}{OPTIMIZING}{page}"
    done = run_forked(TORCH, "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.float64 ['coupled-7'"), done.stdout


@pytest.mark.nightly
def test_strict_scripts_pass_against_what_the_wheels_install(tmp_path):
    """Installed as the wheels are: their packages, side by side, before what this environment has."""
    venv.create(tmp_path / "own")
    programs = tmp_path / "own" / "bin"
    installed = next((tmp_path / "own").glob("lib/python*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages")]
    (installed / "others.pth").write_text("\n".join(others))
    for package in PACKAGES:
        shutil.copytree(package, installed / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    assert untyped(programs, tmp_path, TYPED) == untyped(programs, tmp_path, OPTIMIZING) == ""
    refused = untyped(programs, tmp_path, MISTYPED)
    assert refused.count("error:") == 2, refused
    assert "strateg" in refused


README = (ROOT / "README.md").read_text()
RELATIVE = re.compile(r"\]\((?!https://|#)[^)]*\)")


@pytest.mark.parametrize("repository", [None, "https://forge.example/team/collage-monitor/"])
def test_no_relative_link_is_left_on_the_page_that_the_build_makes(repository):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "readme" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["metadata"]["hooks"]["custom"] == {}
    assert len(RELATIVE.findall(README)) > 30
    page = index_page(README, repository)
    assert not RELATIVE.findall(page)
    assert page.count("```") == README.count("```")
    assert ("docs/tour.md" in page) is (repository is not None)


def test_links_and_pictures_lead_to_the_repository():
    text = "![A]({0}docs/a.png) [tour]({1}docs/tour.md#x), [paper](https://arxiv.org/abs/1)"
    places = [f"https://f.example/p/{kind}/HEAD/" for kind in ("raw", "blob")]
    assert index_page(text.format("", ""), "https://f.example/p") == text.format(*places)
    assert index_page("![A](docs/a.png)See [the *tour*](docs/tour.md).", None) == "See the *tour*."


@pytest.mark.parametrize("folder", ["agent", "server"])
def test_the_other_distributions_carry_the_licence_and_their_pages_stand_alone(folder):
    """Nothing lies beside them on an index: they have no links within the repository, and say what to install."""
    assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    text = (ROOT / folder / "README.md").read_text()
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert project["readme"] == "README.md"
    assert index_page(text, None) == text
    assert f"pip install {project['name']}" in text
    assert len(text.split()) < 600, "a page"


def test_who_cites_the_software_is_given_its_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
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
        shutil.copy(ROOT / name, tmp_path / name)
    if (ROOT / "CODE_OF_CONDUCT.md").read_text().count("CONTACT"):
        assert addresses.lacking(tmp_path) == PLACES
    addresses.write(tmp_path, "https://old.example/a/b", "https://old.example/site", "old@team.example")
    addresses.write(tmp_path, "https://forge.example/team/name/", "https://team.example/name", "us@team.example")
    assert addresses.lacking(tmp_path) == []
    repository = "https://forge.example/team/name"
    urls = {"Documentation": "https://team.example/name/", "Paper": "https://arxiv.org/abs/2405.03637"}
    urls |= {"Repository": repository, "Issues": f"{repository}/issues"}
    urls |= {"Changelog": f"{repository}/blob/HEAD/CHANGELOG.md"}
    for name in addresses.DISTRIBUTIONS:
        assert tomllib.loads((tmp_path / name).read_text())["project"]["urls"] == urls
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["url"] == "https://team.example/name/"
    assert "write to us@team.example." in (tmp_path / "CODE_OF_CONDUCT.md").read_text()
    page = (tmp_path / "docs/how-to/long-jobs.md").read_text()
    assert "uses: team/name@v0.1.0" in page
    assert "repo: https://forge.example/team/name\n" in page
    assert not any("old." in (tmp_path / name).read_text() for name in PLACES)


@pytest.mark.parametrize(
    ("place", "mail", "said"),
    [("http://f.example/p", "a@b.example", "no address"), ("https://f.example/p", "us", "'us' is no mail address")],
)
def test_a_wrong_address_is_refused_before_anything_is_written(place, mail, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        addresses.write(tmp_path, place, "https://s.example/", mail)


def test_a_release_is_signed_lists_what_it_brings_and_has_addresses():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    told = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert told.index("python -m tools.addresses") < told.index("make release") < told.index("make sbom")
    (upload,) = [step for step in jobs["publish"]["steps"] if "gh-action-pypi-publish" in step["uses"]]
    assert upload["with"]["attestations"] is True
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert re.fullmatch(r"pypa/gh-action-pypi-publish@[0-9a-f]{40}", upload["uses"])


def test_each_benchmark_that_the_readme_names_is_there_and_measures_as_many_steps_as_it_says():
    named = set(re.findall(r"python -m benchmarks\.(\w+)", README))
    assert {"watch", "device", "first_steps"} <= named
    assert [name for name in named if not (ROOT / "benchmarks" / f"{name}.py").is_file()] == []
    assert f"first {first_steps.STEPS} steps" in README


@pytest.mark.nightly
def test_the_agents_cost_is_a_part_of_the_watched_training_and_holds_the_first_measured_step(monkeypatch):
    monkeypatch.setattr(_training, "LAYERS", 2)
    monkeypatch.setattr(first_steps, "WARM_UP", 1)
    found = first_steps.begin(2, 0)
    assert 0 < found.agent < found.watched
    assert found.alone > 0
    # Two trainings of one seed take the same steps: without the agent's part they are alike, on a busy machine too.
    assert 0.3 < (found.watched - found.agent) / found.alone < 3
