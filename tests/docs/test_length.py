"""No page is longer than people read at once, but for what is generated and tables that the code holds."""

import pytest

from tests.docs.blocks import DOCS
from tools.sizes import BUDGETS, GENERATED, HELD_TABLES, against_budgets, page_words

MOST_WORDS = 1500
WORDS = {page: words for page, words in page_words().items() if page.startswith("docs/")}


@pytest.mark.parametrize("page", WORDS)
def test_a_page_can_be_read_at_once(page):
    assert WORDS[page] <= MOST_WORDS


def test_what_is_excused_is_there_and_held_where_it_says():
    for page, holder in HELD_TABLES.items():
        assert page in WORDS
        assert (DOCS.parent / holder).is_file()
    assert all((DOCS.parent / name).exists() for name in GENERATED)


@pytest.mark.parametrize(("count", "above", "loose"), [(1001, 1, 0), (1000, 0, 0), (990, 0, 0), (989, 0, 1)])
def test_budgets_hold_and_only_fall(count, above, loose):
    """A count above its budget is a breach; a budget more than 1 % above its count should fall."""
    found = against_budgets(BUDGETS | {"tests": count}, BUDGETS | {"tests": 1000})
    assert [len(lines) for lines in found] == [above, loose]
