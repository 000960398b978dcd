"""docs/sizing.md: every quantity follows from the measured figures by the formula printed beside it."""

import math
import re
from pathlib import Path

import pytest
from collage_server.settings import Settings

from benchmarks._population import LARGE

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()


def rows_of(heading):
    """Cells of the table below a heading, without its head."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def number(text):
    return float(text.replace(",", ""))


MEASURED = {row[0].strip("`"): number(row[1]) for row in rows_of("What was measured")}
QUANTITIES = rows_of("What follows")


@pytest.mark.parametrize("column", [0, 1, 2], ids=["10", "1,000", "10,000"])
def test_each_quantity_follows(column):
    known = {**MEASURED, "ceil": math.ceil}
    for name, formula, *stated in QUANTITIES:
        value = number(stated[column])
        if formula != "given":
            expected = eval(formula.strip("`"), {"__builtins__": {}}, known)
            assert value == pytest.approx(expected, rel=0.01), name
        known[name.strip("`")] = value
    assert len(known) == len(MEASURED) + 1 + len(QUANTITIES)


def test_the_report_is_that_of_the_benchmark():
    assert (MEASURED["layers"], MEASURED["rows"]) == (LARGE.layers, len(LARGE.statistics))


def test_what_is_stated_of_retention_are_settings():
    named = re.findall(r"`COLLAGE_SERVER_([A-Z_]+)`", TEXT)
    assert named
    assert {name.lower() for name in named} <= set(Settings.__dataclass_fields__)
