"""No page is longer than people read at once, but for what is generated and tables that the code holds."""

import pytest

from tests.docs.blocks import DOCS

MOST_WORDS = 1500
GENERATED = {"alerts.md": "collage_server.alert_documents", "command.md": "tools.command_page"}
HELD_TABLES = {
    "access.md": "tests/server/test_matrix.py",
    "architecture.md": "tests/paths.py",
    "delivery.md": "tests/agent_delivery/test_documentation.py",
    "explanation/what-accumulates.md": "benchmarks/accumulation.py",
    "keepers.md": "tests/keepers/table.py",
    "metrics.md": "tests/docs/test_metrics.py",
    "optimizers.md": "tests/agent/intent/matrix.py",
}
"""Pages whose tables are generated or compared with the code, and where; their other words are counted."""
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
COUNTED = [page for page in PAGES if page not in GENERATED and not page.startswith(("api/", "studies/"))]


@pytest.mark.parametrize("page", COUNTED)
def test_a_page_can_be_read_at_once(page):
    lines = (DOCS / page).read_text().splitlines()
    counted = [line for line in lines if not (page in HELD_TABLES and line.startswith("|"))]
    assert sum(word != "|" for line in counted for word in line.split()) <= MOST_WORDS


def test_what_is_excused_is_there_and_held_where_it_says():
    for page, holder in HELD_TABLES.items():
        assert page in PAGES
        assert (DOCS.parent / holder).is_file()
    assert set(GENERATED) <= set(PAGES)
