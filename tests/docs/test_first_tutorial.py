"""docs/tutorials/first-lost-update: the page prints what it says, and so does its notebook, cell by cell."""

import contextlib
import io
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


def test_the_notebook_runs_cell_by_cell():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert "".join(code[0]["source"]).startswith("%pip install"), "a notebook brings what it needs"
    namespace: dict = {}
    for cell in code[1:]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
        said = "".join(line for output in cell["outputs"] for line in output["text"])
        assert printed.getvalue() == said, cell["id"]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["id"])
def test_a_notebook_leads_to_no_page_that_is_not_beside_it(cell):
    assert "](" not in "".join(cell["source"])
