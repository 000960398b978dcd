"""docs/metrics.md and the catalogue say the same: every name, its unit, formula and merge rules, and no other; a
strategy's bytes a parameter are those of the contract's table on every page and in every docstring."""

import re

import pytest
from collage_optim import STRATEGIES as OFFERED

from collage_monitor.metrics import METRICS, SCALARS, STATISTICS
from collage_monitor.strategies import STRATEGIES
from tests.docs.blocks import DOCS

TEXT = (DOCS / "metrics.md").read_text()


def rows_of(heading):
    """The cells of the table rows below a heading, by name."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace(r"\|", "|") for cell in row] for row in rows]
    return {row[0].strip("`"): row[1:] for row in cells}


def key(entry):
    return f"{entry.name}/{entry.label.upper()}" if entry.label else entry.name


EXPECTED: dict = {
    "Metrics": {key(entry): [entry.unit, f"`{entry.formula}`", entry.help] for entry in METRICS.values()},
    "Statistics": {
        key(entry): [entry.unit, entry.over_shards, entry.over_steps, entry.help] for entry in STATISTICS.values()
    },
    "Scalars": {entry.name: [entry.unit, entry.source, entry.help] for entry in SCALARS.values()},
    "Strategies": {
        entry.name: [entry.keeps, str(entry.bytes_per_parameter or "—")] for entry in STRATEGIES.values()
    },
}


@pytest.mark.parametrize("heading", EXPECTED)
def test_the_table_is_that_of_the_catalogue(heading):
    assert rows_of(heading) == EXPECTED[heading]


ROOT = DOCS.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("agent/*.md"), *ROOT.glob("server/*.md"), *DOCS.rglob("*.md")])
MODULES = [
    path for folder in ("collage_monitor", "agent", "server", "dashboard") for path in (ROOT / folder).rglob("*.py")
]
_NAME = "|".join(sorted(map(re.escape, STRATEGIES), key=len, reverse=True))
_TOLD = re.compile(rf"[`'\"]({_NAME})[`'\"][^`'\".;|()\n]{{0,30}}\((\d+)(?: bytes|\))")
_SCALES = 1 / 16
"""Bytes a parameter of the scales of two moments in blocks, which some tables count and others round away."""


def told(text):
    """Line, strategy and bytes of each claim: in brackets behind a name, or in a table's column of bytes."""
    heads: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, name, float(size)) for name, size in _TOLD.findall(line))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        heads = [] if not line.startswith("|") else heads or cells
        columns = [place for place, head in enumerate(heads) if head in {"bytes a parameter", "bytes"}]
        if columns and cells != heads and re.match(r"\d+(\.\d+)?$", cells[columns[0]]) and "float32" not in cells:
            names = re.findall(rf"`({_NAME})`", line) or [cell for cell in cells if cell in STRATEGIES]
            yield from ((number, name, float(cells[columns[0]])) for name in names)


def test_the_bytes_are_those_of_the_contract():
    claims = [(path, *claim) for path in [*PAGES, *MODULES] for claim in told(path.read_text())]
    wrong = [
        claim for claim in claims if not 0 <= claim[3] - (STRATEGIES[claim[2]].bytes_per_parameter or 0) <= _SCALES
    ]
    assert not wrong
    assert len(claims) > 150
    assert {claim[2] for claim in claims} == {
        name for name, entry in STRATEGIES.items() if entry.bytes_per_parameter
    }


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("use 'split-master' (12 bytes a parameter)", (1, "split-master", 12)),
        ("| bytes a parameter | strategy |\n|---|---|\n| 9.06 | `coupled-9` |", (3, "coupled-9", 9.06)),
        ("| strategy | bytes |\n|---|---|\n| plus | 10 |", (3, "plus", 10)),
    ],
)
def test_a_claim_is_seen(text, claim):
    assert list(told(text)) == [claim]


def test_the_strategies_are_counted_right():
    assert OFFERED.keys() == {name for name, entry in STRATEGIES.items() if entry.bytes_per_parameter}
    assert len(OFFERED) == 16
    assert "all sixteen" in (ROOT / "agent/README.md").read_text()
    assert "sixteen storage strategies" in (ROOT / "CHANGELOG.md").read_text()
