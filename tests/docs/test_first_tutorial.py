"""docs/tutorials/first-lost-update: the page prints what it says, and so does its notebook, cell by cell."""

import json

import pytest

from tools.notebooks import NOTEBOOK, PAGE, notebook, ran

CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def test_the_page_prints_what_it_says():
    text = PAGE.read_text()
    assert text.count("```text") == 5
    assert ran(text) == text, "python -m tools.notebooks writes its outputs anew"


def test_the_page_says_what_it_promises():
    text = PAGE.read_text()
    assert "```text\n1.0\n1.0078125\n```" in text
    assert "strategy plain, step 100: losing updates" in text
    assert "strategy split-master, step 100: healthy" in text


def test_the_notebook_is_the_page():
    assert NOTEBOOK.read_text() == notebook(PAGE.read_text()), "python -m tools.notebooks writes it anew"
    first = next(cell for cell in CELLS if cell["cell_type"] == "code")
    assert "".join(first["source"]).startswith("%pip install"), "a notebook brings what it needs"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["id"])
def test_a_notebook_leads_to_no_page_that_is_not_beside_it(cell):
    assert "](" not in "".join(cell["source"])
