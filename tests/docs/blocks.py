"""Code blocks of pages, to be run as they stand."""

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of a page in this language, in order."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


def outputs(page: str) -> list[str]:
    """What the page says that its blocks print: blocks in `text`."""
    return blocks(page, "text")
