"""CONTRIBUTING.md names files that exist, and commands that the Makefile has; the version stands in one place."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import collage_optim
import pytest

import collage_monitor

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", TEXT)))


@pytest.mark.parametrize("name", NAMED)
def test_every_named_path_exists(name):
    folders = [ROOT, *(path.parent for path in ROOT.glob("*/collage_*") if path.is_dir())]
    assert any((folder / name).exists() for folder in folders), name


def test_the_map_names_files_and_a_test_for_each_addition():
    section = TEXT.partition("## To add")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| a")]
    assert len(rows) == 12
    for row in rows:
        files, test = row.split("|")[2:4]
        assert re.findall(r"`[\w./]+/[\w./]*`", files), row
        assert "`tests/" in test, row


def test_every_make_target_that_is_named_exists():
    made = (ROOT / "Makefile").read_text()
    for page in ("CONTRIBUTING.md", "README.md"):
        for target in re.findall(r"`make ([a-z]+)", (ROOT / page).read_text()):
            assert re.search(rf"^{target}:", made, re.MULTILINE), f"{page}: make {target}"


def test_the_version_stands_in_one_place():
    """The others, of the three distributions and of what they ask of each other, are named where they differ."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert version("collage-monitor") == collage_monitor.__version__
    assert f"## {collage_monitor.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert collage_optim.__version__ == collage_monitor.__version__, "agent/collage_optim/__init__.py"
    pinned = 0
    for name in ("pyproject.toml", "agent/pyproject.toml", "server/pyproject.toml"):
        text = (ROOT / name).read_text()
        told = re.findall(r'^version = "(.+)"|"collage-[\w-]+(?:\[\w+\])?==(.+?)"', text, re.MULTILINE)
        assert {found for pair in told for found in pair if found} <= {collage_monitor.__version__}, name
        pinned += len(told)
        assert not re.search(r'"collage-(optim|monitor-server)(\[\w+\])?"', text.partition("dependencies")[2]), name
    assert pinned == 6, "the server's version, and five requirements"
