"""What a misspelt word may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["similar"]


def similar(word: str, known: Iterable[str]) -> str:
    """Ask which of up to three similar names was meant: "did you mean 'a' or 'b'?"; "" if none is similar."""
    others = list(dict.fromkeys(known))
    near = get_close_matches(word, others, n=3) or [own for own in others if word in own.split("_")]
    return f"did you mean {' or '.join(map(repr, near[:3]))}?" if near else ""
