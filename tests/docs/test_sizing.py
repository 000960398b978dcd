"""docs/sizing.md: every quantity follows by the formula printed beside it, and the code has its constants."""

import math
import re
from pathlib import Path

import pytest
from collage_server.settings import FIXED_LIMITS, Settings
from collage_server.store.archive import archive_reader, parquet
from collage_server.store.sealing import archive_plan
from collage_server.store.sealing.seal_plan import SealLimits

from benchmarks._population import LARGE
from benchmarks.growth import left_behind

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
GROWTH = rows_of("10¹¹ numbers")
FUNCTIONS = {"ceil": math.ceil, "min": min}
CODE = {
    "chunk": SealLimits().points,
    "fine_chunks": archive_plan._CHUNKS[1],
    "coarse_chunks": archive_plan._CHUNKS[16],
    "coarsest_chunks": archive_plan._MOST_CHUNKS,
    "footers_kept": archive_reader._KEPT_BYTES,
    "footer_memory": parquet._MEMORY_A_BYTE,
    "cache": FIXED_LIMITS.archive_cache_bytes,
}


def follow(quantities, column, measured):
    """Every quantity of a column, each what its formula makes of those before it."""
    known = {**measured, **FUNCTIONS}
    for name, formula, *stated in quantities:
        value = number(stated[column])
        if formula.startswith("`"):
            expected = eval(formula.strip("`"), {"__builtins__": {}}, known)
            assert value == pytest.approx(expected, rel=0.01), name
        known[name.strip("`")] = value
    assert len(known) == len(measured) + len(FUNCTIONS) + len(quantities)
    return known


@pytest.mark.parametrize("column", [0, 1, 2], ids=["10", "1,000", "10,000"])
def test_each_quantity_follows(column):
    follow(QUANTITIES, column, MEASURED)


@pytest.mark.parametrize("column", [0, 1, 2], ids=["short", "middling", "long"])
def test_each_quantity_of_many_runs_follows_and_the_code_has_its_constants(column):
    known = follow(GROWTH, column, {})
    stated = {name.strip("`") for name, formula, *_ in GROWTH if formula == "code"}
    assert {name: known[name] for name in stated} == CODE
    assert known["numbers"] == 1e11


@pytest.mark.parametrize("points", [300, 1300])
def test_a_run_leaves_as_many_files_as_stated(tmp_path, points):
    (formula,) = (formula.strip("`") for name, formula, *_ in GROWTH if name == "`files_a_run`")
    known = {**CODE, **FUNCTIONS, "points": points, "chunks": points // CODE["chunk"]}
    expected = eval(formula, {"__builtins__": {}}, known)
    assert left_behind(tmp_path, points, 1, seed=0, copies=1).files == expected


def test_the_report_is_that_of_the_benchmark_and_what_is_stated_of_retention_are_settings():
    assert (MEASURED["layers"], MEASURED["rows"]) == (LARGE.layers, len(LARGE.statistics))

    named = re.findall(r"`COLLAGE_SERVER_([A-Z_]+)`", TEXT)
    assert named
    assert {name.lower() for name in named} <= set(Settings.__dataclass_fields__)
