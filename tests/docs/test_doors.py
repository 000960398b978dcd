"""The first table of docs/integrations.md says of each package what its door says, and which test holds it."""

import re
from pathlib import Path

import pytest

from drills.doors.__main__ import known
from drills.doors.installed import DOORS

ROOT = Path(__file__).parents[2]
REAL = {name: door for name, door in known().items() if not door.cannot}


def row(door, ran):
    return f"| {door.package} {door.version} | {ran} | {door.lines} | {door.seen} |"


def expected():
    rows = [row(door, f"real, `make test`: `{door.held_by}`") for door in DOORS]
    for name, door in known().items():
        held = f"`{door.held_by}`"
        what = f" ({door.part})" if door.part else ""
        real = f"real{what}, `make doors`: `drills/doors/{name}.py`; `make test`: {held}"
        rows.append(row(door, f"replica: {held} ({door.cannot})" if door.cannot else real))
    return rows


def test_the_first_table_is_that_of_the_doors():
    page = (ROOT / "docs/integrations.md").read_text()
    table = re.search(r"^\|.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert table.group().splitlines()[2:] == expected()


@pytest.mark.parametrize("door", [*DOORS, *known().values()], ids=lambda door: door.package)
def test_each_is_held_by_a_test_that_there_is_and_make_test_trains_with_the_version_named(door):
    assert (ROOT / door.held_by).is_file()
    assert door not in DOORS or f"\n{door.package}=={door.version}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("name", REAL)
def test_a_real_package_is_installed_at_the_version_named(name):
    door = REAL[name]
    pinned = [entry.replace("_", "-") for entry in door.requirements]
    assert f"{door.package}=={door.version}" in pinned
    assert "def train(" in (ROOT / f"drills/doors/{name}.py").read_text()
