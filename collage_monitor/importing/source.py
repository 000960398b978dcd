"""What every kind of file is turned into before it is sent."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from collage_monitor import wire
from collage_monitor.errors import CollageError

__all__ = ["ImportRefusal", "Source", "new_run_id"]

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class ImportRefusal(CollageError):
    """A file that cannot be imported: where it goes wrong, and what to do about it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A run to come. `reports` is read once, while it is sent; `reports_expected` is None where nobody knows."""

    name: str
    reports: Iterator[wire.Report]
    reports_expected: int | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    watch: wire.WatchInfo | None = None
    layers: list[wire.Layer] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)

    def named(self, name: str) -> Source:
        """The same run under another name."""
        return replace(self, name=name)


def new_run_id() -> str:
    """A random run id that sorts by time: 48 bits of milliseconds and 80 random ones in Crockford's base 32."""
    number = (time.time_ns() // 1_000_000 << 80) | secrets.randbits(80)
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))
