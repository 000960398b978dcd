"""Text for the terminal: names that cannot steer it, times, tables, and colours where it has them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click

from collage_monitor.number_text import UNDEFINED

__all__ = ["clock", "coloured", "cut", "printable", "table"]

_DIGITS: Final = 6
_NAME: Final = 28
"""Characters that a table shows of a name."""
_NUMBER: Final = re.compile(r"–|[<>] [\d.]+ %|[-−\d.,e+]+( %)?|NaN|−?∞|nan|-?inf")
_COLOURS: Final = {"healthy": "green", "unknown": "yellow"}


def printable(text: str) -> str:
    """A name for the terminal: a run's texts can neither control the terminal nor start a new line."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def cut(name: str) -> str:
    """A name without its middle, if it is long: names of runs differ at their ends."""
    half = _NAME // 2
    return name if len(name) <= _NAME else f"{name[: half - 1]}…{name[-half:]}"


def coloured(text: str, health: str) -> str:
    """Text in the colour of a health, unless NO_COLOR is set; `click.echo` leaves colours out of what is no
    terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=_COLOURS.get(health, "red"))


def clock(seconds: float) -> str:
    """A time, in seconds since 1970, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows in columns below their names; columns of numbers to the right."""
    cells = [[printable(name) for name in names], *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(map(_NUMBER.fullmatch, column[1:])) and len(column) > 1 for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    return UNDEFINED if value is None else printable(str(value))
