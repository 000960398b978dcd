"""The README as a package index shows it. Nothing lies beside it there: links within the repository are dead."""

import re

_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!\w+:|#)([^)\s]+)\)")


def index_page(text: str, repository: str | None) -> str:
    """The text with links that lead to `repository`, an address; without one, links are words and pictures go."""

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if repository is None:
            return "" if picture else words
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository.rstrip('/')}/{kind}/HEAD/{target})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(link, text))
