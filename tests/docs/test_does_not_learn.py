"""docs/how-to/training-does-not-learn.md: what it quotes are sentences that the agent says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line.split("|")[1].strip()
    for line in (ROOT / "docs/how-to/training-does-not-learn.md").read_text().splitlines()
    if line.startswith("| `")
]


@pytest.fixture(scope="module")
def said():
    """All texts of the agent and of the judgement, those over several lines joined."""
    files = [*(ROOT / "collage_monitor/diagnosis").glob("*.py"), *(ROOT / "agent/collage_agent").rglob("*.py")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))


@pytest.mark.parametrize("row", ROWS)
def test_what_the_page_quotes_is_said(row, said):
    for part in row.strip("`").split("…"):
        assert part.strip() in said


def test_the_page_has_its_rows():
    assert len(ROWS) == 10
