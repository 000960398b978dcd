"""Fills in where the project is published: `python -m tools.addresses REPOSITORY SITE CONTACT`, once.

Writes the links of all three distributions, the repository of CITATION.cff, the contact of the code of conduct, and
the name of the action. Alone, it ends with 1 while a place still lacks its address; the workflow of a release asks
that first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = ("pyproject.toml", "agent/pyproject.toml", "server/pyproject.toml")


def write(root: Path, repository: str, site: str, contact: str) -> None:
    """Fill in the addresses in the files below `root`; another call replaces those of an earlier one.

    Args:
        root: The checkout.
        repository: https:// address of the repository.
        site: https:// address of the published site.
        contact: Who answers for the code of conduct: a mail address.

    Raises:
        ValueError: an address is not one of https, or the contact is no mail address.
    """
    for address in (repository, site):
        if urlsplit(address).scheme != "https" or len(urlsplit(address).path.split("/")) < 2:
            raise ValueError(f"{address!r} is no address; write https://HOST/PATH")
    if not re.fullmatch(r"[^@\s]+@[^@\s]+\.\w+", contact):
        raise ValueError(f"{contact!r} is no mail address")
    repository, site = repository.rstrip("/"), site.rstrip("/") + "/"
    links = {
        "Documentation": site,
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
    }
    entries = "".join(f'{name} = "{address}"\n' for name, address in links.items())
    for name in DISTRIBUTIONS:
        _edit(root / name, r"\[project\.urls\]\n(?:(?!Paper).*\n)*", f"[project.urls]\n{entries}")
    cited = f"repository-code: {repository}\nurl: {site}\n"
    _edit(root / "CITATION.cff", r"(?:repository-code: .*\nurl: .*\n)?license: ", f"{cited}license: ")
    _edit(root / "CODE_OF_CONDUCT.md", r"write to \S+\. ", f"write to {contact}. ")
    page, path = root / "docs" / "how-to" / "long-jobs.md", urlsplit(repository).path.strip("/")
    _edit(page, r"uses: \S+@", f"uses: {path}@")
    _edit(page, r"repo: https://\S+", f"repo: {repository}")


def lacking(root: Path) -> list[str]:
    """The files whose addresses are not filled in."""
    lacks: dict[str, Callable[[str], bool]] = {
        **dict.fromkeys(DISTRIBUTIONS, lambda text: "\nRepository = " not in text),
        "CITATION.cff": lambda text: "\nrepository-code: " not in text,
        "CODE_OF_CONDUCT.md": lambda text: "write to CONTACT" in text,
        "docs/how-to/long-jobs.md": lambda text: "OWNER/" in text,
    }
    return [name for name, lacks_it in lacks.items() if lacks_it((root / name).read_text())]


def _edit(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, lambda _: new, path.read_text())
    if count != 1:
        raise ValueError(f"{path}: {pattern!r} stands in it {count} times, not once")
    path.write_text(text)


def main(arguments: list[str]) -> int:
    """Fill the addresses in, or name the files that lack them."""
    if arguments:
        try:
            repository, site, contact = arguments
            write(ROOT, repository, site, contact)
        except ValueError as error:
            sys.exit(f"{error}; python -m tools.addresses REPOSITORY SITE CONTACT")
    for name in (found := lacking(ROOT)):
        print(f"{name}: an address is not filled in")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
