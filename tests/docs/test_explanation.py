"""Code prints what its page says, figures show what it claims, and each block of Python in the docs and the README
is executed by a test, or says that it is a sketch, and why."""

import json
import re

import pytest
import torch

from tests.docs.blocks import DOCS, blocks, outputs
from tools import notebooks
from tools.figures import BETA2, DECAYS, FIGURES, STEPS, additions, decays, grid

PAGE = "explanation/bf16-rounding.md"


@pytest.mark.parametrize(("page", "count"), [(PAGE, None), ("how-to/choose-a-strategy.md", 3)])
def test_the_code_prints_what_the_page_says(page, count, capsys):
    """The first blocks of a page that has others: `test_followed.py` runs those."""
    namespace = {"torch": torch, "model": torch.nn.Linear(4, 4).bfloat16()}
    for code in blocks(page)[:count]:
        exec(compile(code, page, "exec"), namespace)
    assert capsys.readouterr().out == "".join(outputs(page))


def test_the_figures_show_what_the_page_says():
    text = (DOCS / PAGE).read_text()
    assert sorted(re.findall(r"images/(\w+)\.svg", text)) == sorted(FIGURES)
    for name in FIGURES:
        picture = (DOCS / "explanation/images" / f"{name}.svg").read_text()
        assert picture.startswith("<?xml"), "python -m tools.figures"
    numbers = grid(1.0, 2.0)
    assert (numbers[1], len(numbers) - 1) == (1.0078125, 128)
    found = additions()
    assert set(found["plain"]) == {1.0}, "every update is lost"
    assert found["pair"][STEPS] == pytest.approx(found["exact"][STEPS], abs=2.0**-13)
    assert len(set(found["visible"])) == 4, "the visible weight moves by whole gaps"
    moments = decays()
    assert set(moments["bfloat16"]) == {1.0}
    assert moments["exact"][DECAYS] == pytest.approx(BETA2**DECAYS)


@pytest.mark.parametrize(
    ("weight", "half", "arrives"), [(1.0, 0.0039, False), (0.1, 0.00024, False), (0.01, 0.00003, True)]
)
def test_the_table_of_half_gaps(weight, half, arrives):
    number = torch.tensor(weight, dtype=torch.bfloat16)
    gap = torch.nextafter(number, 2 * number).double() - number.double()
    assert gap.item() / 2 == pytest.approx(half, rel=0.05)
    assert ((number + 1e-4) != number).item() is arrives


TUTORIAL = notebooks.PAGE.read_text()
CELLS = json.loads(notebooks.NOTEBOOK.read_text())["cells"]


@pytest.mark.slow
def test_the_first_tutorial_prints_what_it_says_and_says_what_it_promises():
    assert TUTORIAL.count("```text") == 5
    assert notebooks.ran(TUTORIAL) == TUTORIAL, "python -m tools.notebooks writes its outputs anew"
    assert "```text\n1.0\n1.0078125\n```" in TUTORIAL
    assert "strategy plain, step 100: losing updates" in TUTORIAL
    assert "strategy split-master, step 100: healthy" in TUTORIAL


def test_its_notebook_is_the_page_and_leads_to_no_page_that_is_not_beside_it():
    notebook = notebooks.notebook(TUTORIAL)
    assert notebooks.NOTEBOOK.read_text() == notebook, "python -m tools.notebooks writes it anew"
    first = next(cell for cell in CELLS if cell["cell_type"] == "code")
    assert "".join(first["source"]).startswith("%pip install"), "a notebook brings what it needs"
    assert [cell["id"] for cell in CELLS if "](" in "".join(cell["source"])] == []


ROOT = DOCS.parent
EXECUTED = {
    "../README.md": "tests/docs/test_followed.py",
    "explanation/bf16-rounding.md": "tests/docs/test_explanation.py",
    "how-to/choose-a-strategy.md": "tests/docs/test_explanation.py",
    "how-to/export-and-import.md": "tests/docs/test_followed.py",
    "tutorials/first-lost-update.md": "tests/docs/test_explanation.py",
    "tutorials/sick-to-cured.md": "tests/docs/test_followed.py",
}
"""Pages whose blocks a test executes. `make release` executes the README's first one."""
PAGES = ["../README.md", *sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))]
SKETCH = re.compile(r"<!-- sketch: (\S.*?) -->\n\n *```python\n")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and not page.startswith("api/")])
def test_a_block_is_executed_or_a_sketch_with_a_reason(page):
    text = (DOCS / page).read_text()
    reasons = SKETCH.findall(text)
    if page in EXECUTED:
        assert (ROOT / EXECUTED[page]).is_file()
        assert len(blocks(page)) > len(reasons)
    else:
        assert len(reasons) == len(blocks(page)), (
            f"{page}: <!-- sketch: why --> before a block that no test executes"
        )


def test_what_a_reason_names_is_there():
    named = [
        name for page in PAGES for reason in SKETCH.findall((DOCS / page).read_text()) for name in reason.split()
    ]
    files = [name.rstrip(";,") for name in named if name.startswith(("tests/", "docs/"))]
    assert len(files) > 8
    assert [name for name in files if not (ROOT / name).exists()] == []
