"""A tutorial's outputs and its notebook, from its page: `python -m tools.notebooks`.

The page's Python blocks run one after the other. A `text` block right after one becomes its output.
"""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
PAGE = FOLDER / "first-lost-update.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
_CODE = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def ran(text: str) -> str:
    """The page's text with what its blocks print now."""
    namespace: dict[str, Any] = {}

    def block(found: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(found[1], PAGE.name, "exec"), namespace)
        shown = f"\n```text\n{printed.getvalue()}```\n" if found[2] is not None else ""
        return f"```python\n{found[1]}```\n{shown}"

    return _CODE.sub(block, text)


def notebook(text: str) -> str:
    """The page as a notebook, its outputs included; links to pages of the site keep their words alone."""
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": list(_cells(text)), "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _cells(text: str) -> Iterator[dict[str, Any]]:
    text = re.sub(r" This tutorial is also a notebook: [^\n]*", "", text)
    text = re.sub(r"```sh\npip install ('.*?')\n```", r"```python\n%pip install --quiet \1\n```", text)
    text = re.sub(r"\[([^]]+)\]\((?!\w+:)[^)]+\)", r"\1", text)
    end = 0
    for number, found in enumerate(_CODE.finditer(text)):
        yield _cell("markdown", f"text-{number}", text[end : found.start()].strip(), {})
        output = {"name": "stdout", "output_type": "stream", "text": (found[2] or "").splitlines(keepends=True)}
        more = {"execution_count": None, "outputs": [output] if found[2] else []}
        yield _cell("code", f"code-{number}", found[1].strip(), more)
        end = found.end()
    yield _cell("markdown", "text-last", text[end:].strip(), {})


def _cell(kind: str, name: str, text: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True), **more}


def main() -> None:
    """Write the page's outputs and the notebook again."""
    text = ran(PAGE.read_text())
    PAGE.write_text(text)
    NOTEBOOK.write_text(notebook(text))


if __name__ == "__main__":
    main()
