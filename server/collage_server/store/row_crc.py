"""The checks of a row that tells of runs: a CRC for each group of its columns that are read together.

`schema.py` has them made with each new row, `row_checks.py` changes and compares them. What a text or number is
written as must never change: rows keep their checks over releases (`tests/server/store/test_row_damage.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import Double, Table

__all__ = ["CRC_BYTES", "checks_of", "checks_of_new_row", "group_check", "groups_of", "part_of"]

CRC_BYTES: Final = 4
_GROUPS: Final = {
    "layer": (("run_id", "layer", "name"), ("run_id", "layer", "shape", "dtype", "module_type")),
    "stream": (
        (
            *("run_id", "stream_id", "stream", "attempt", "rank", "world_size", "process_id", "created_at"),
            *("statistics", "layers", "elements", "replicas"),
        ),
        ("run_id", "stream_id", "attempt", "watch"),
    ),
    "run_summary": (
        ("run_id", "updated_at", "reports", "is_evaluated", "point"),
        (
            *("run_id", "last_step", "edq_ratio", "lost_update_ratio", "state_decrement_ratio", "loss"),
            *("validation_loss", "bytes_per_parameter", "tokens_per_second", "health"),
            *("made_by", "made_at", "overview"),
        ),
        ("run_id", "findings", "intended_share"),
    ),
    "run_latest": (
        ("run_id", "stream_id", "attempt", "rank", "sealed", "given_up", "frozen_step"),
        (
            *("run_id", "stream_id", "attempt", "rank", "reports", "last_seq", "first_step", "last_step"),
            *("first_time", "last_report_at", "measured_seq", "measured_step", "scalars", "clock_skew_seconds"),
            "unfinished",
        ),
    ),
}
"""Of tables whose columns are not all read, or not all written, together."""
_NUMBERS: Final = (int, float)
_PLAIN: Final = frozenset({*_NUMBERS, str, bool, type(None)})
"""Types of values that are written as they are; others are bytes, and numbers of numpy."""


@cache
def groups_of(table: Table) -> Sequence[tuple[tuple[str, bool, Any], ...]]:
    """Groups of columns: name, whether it holds floating-point numbers, and the default that the database has."""
    every = tuple(column.name for column in table.c if column.name != "checks")
    return [
        tuple((name, isinstance(table.c[name].type, Double), _default(table, name)) for name in names)
        for names in _GROUPS.get(table.name, (every,))
    ]


def part_of(checks: bytes, group: int) -> bytes:
    """The check of one group among those of all."""
    return checks[CRC_BYTES * group : CRC_BYTES * (group + 1)]


def _default(table: Table, name: str) -> Any:
    given: Any = table.c[name].server_default
    return None if given is None else given.arg


def group_check(table: Table, group: int, values: Mapping[Any, Any]) -> bytes:
    """The check of one group of columns."""
    held = []
    for name, is_float, default in groups_of(table)[group]:
        value = values.get(name, default)
        if type(value) not in _PLAIN:
            value = (zlib.crc32(value), len(value)) if isinstance(value, bytes) else _as_plain(value)
        if is_float and type(value) in _NUMBERS:
            value = float(value) + 0.0  # SQLite has no -0.
        held.append(value)
    # `ascii`, since what `repr` escapes depends on Python's version.
    return zlib.crc32(ascii(held).encode()).to_bytes(CRC_BYTES, "little")


def _as_plain(value: Any) -> Any:
    return str.__str__(value) if isinstance(value, str) else value.item()


def checks_of(table: Table, values: Mapping[Any, Any]) -> bytes:
    """The checks of all groups of a row, by column."""
    return b"".join(group_check(table, group, values) for group in range(len(groups_of(table))))


def checks_of_new_row(context: Any) -> bytes:
    """The same as SQLAlchemy's default of the column."""
    return checks_of(context.current_column.table, context.get_current_parameters())
