"""Text for the terminal: names that cannot steer it, numbers, times, tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["clock", "number", "printable", "table"]

_DIGITS: Final = 6


def printable(text: str) -> str:
    """A name for the terminal: a run's texts can neither control the terminal nor start a new line."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def number(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits; "-" if it is undefined."""
    return "-" if value is None else f"{value:.{digits}g}"


def clock(seconds: float) -> str:
    """A time, in seconds since 1970, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows in columns below their names; columns of numbers to the right."""
    cells = [[printable(name) for name in names], *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [any(isinstance(row[place], int | float) for row in rows) for place in range(len(names))]
    lines = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return number(value, _DIGITS) if value is None or isinstance(value, float) else printable(str(value))
