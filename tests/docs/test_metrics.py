"""docs/metrics.md and the catalogue say the same: every name, its unit, formula and merge rules, and no other."""

import re
from pathlib import Path

from collage_monitor.metrics import METRICS, SCALARS, STATISTICS
from collage_monitor.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "metrics.md").read_text()


def rows_of(heading):
    """The cells of the table rows below a heading, by name."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace(r"\|", "|") for cell in row] for row in rows]
    return {row[0].strip("`"): row[1:] for row in cells}


def key(entry):
    return f"{entry.name}/{entry.label.upper()}" if entry.label else entry.name


def test_metrics():
    expected = {key(entry): [entry.unit, f"`{entry.formula}`", entry.help] for entry in METRICS.values()}
    assert rows_of("Metrics") == expected


def test_statistics():
    expected = {
        key(entry): [entry.unit, entry.over_shards, entry.over_steps, entry.help] for entry in STATISTICS.values()
    }
    assert rows_of("Statistics") == expected


def test_scalars():
    assert rows_of("Scalars") == {entry.name: [entry.unit, entry.source, entry.help] for entry in SCALARS.values()}


def test_strategies():
    found = rows_of("Strategies")
    assert found == {
        entry.name: [entry.keeps, str(entry.bytes_per_parameter or "—")] for entry in STRATEGIES.values()
    }
