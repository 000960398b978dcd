"""Each block of Python in the docs and the README is executed by a test, or says that it is a sketch, and why."""

import re

import pytest

from tests.docs.blocks import DOCS, blocks

ROOT = DOCS.parent
EXECUTED = {
    "../README.md": "tests/docs/test_adopt.py",
    "explanation/bf16-rounding.md": "tests/docs/test_explanation.py",
    "how-to/choose-a-strategy.md": "tests/docs/test_explanation.py",
    "how-to/export-and-import.md": "tests/docs/test_recipes.py",
    "tutorials/first-lost-update.md": "tests/docs/test_first_tutorial.py",
    "tutorials/sick-to-cured.md": "tests/docs/test_tutorial.py",
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
