"""Checksums of rows: of the journal, of chunks, of what tells of runs, of tokens, incidents and the audit log. A
flipped bit is an error to whoever reads the row, and in a list that row is left out.

SQLite's pages have no checksum. Each covers the row's own place and counts, too: totals under another step or
statistic are as wrong as other ones. A row of a server without checksums has none (null), and is read unchecked.

The columns are called `checks`; changing what one covers needs a migration
(`tests/server/store/test_row_damage.py`).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from struct import Struct
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
from cachetools import TTLCache, cached
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Row, Select, Table, or_, select, update
from sqlalchemy.exc import DatabaseError

from collage_monitor import wire
from collage_server.errors import Damaged
from collage_server.store import schema
from collage_server.store.row_crc import CRC_BYTES, checks_of, group_check, groups_of, part_of
from collage_server.store.row_helpers import damage_behind

__all__ = [
    "CHECK_BYTES",
    "LAYER_PLACE",
    "LOGGED_PARTS",
    "MODEL_PARTS",
    "REPORT_PARTS",
    "are_layers_whole",
    "chunk_check",
    "chunk_name",
    "damaged_rows",
    "is_row_whole",
    "is_whole",
    "layer_checks",
    "or_damaged",
    "point_checks",
    "report_checks",
    "require_points",
    "require_report",
    "require_row",
    "tell_damage",
    "update_rows",
    "whole_logged",
    "whole_of",
    "whole_rows",
    "whole_runs",
]

_Told = TypeVar("_Told")

_LOG: Final = logging.getLogger(__name__)
CHECK_BYTES: Final = 8
"""Of each layer in `layer_checks`."""
REPORT_PARTS: Final = {
    "scalars": ("run_id", "stream_id", "seq", "step", "time", "scalars"),
    "model": ("run_id", "stream_id", "seq", "step", "time", "parts", "statistic_count", "model"),
    "statistics": (
        *("run_id", "stream_id", "seq", "step", "time", "parts", "statistic_count", "layer_count"),
        "statistics",
    ),
}
"""Columns of a report that are read together, each group with a check of its own; the last one is the content."""
_PLACES: Final = {part: place for place, part in enumerate(REPORT_PARTS)}
_CHUNK: Final = ("run_id", "attempt", "level", "chunk", "part")
_POINT_PARTS: Final = (
    (*_CHUNK, "point_count", "first_step", "last_step", "points"),
    (*_CHUNK, "point_count", "contributor_ranks", "contributor_streams", "unfinished", "contributors"),
)
MODEL_PARTS: Final = (*_CHUNK, "rank", "point_count", "entries", "data")
LAYER_PLACE: Final = (*_CHUNK, "entry", "point_count", "layer_count")
"""The place of `layer_checks`, beside the data."""
LOGGED_PARTS: Final = ("run_id", "stream_id", "name", "part", "point_count", "data")
_FORMATS: Final = ["%s\0" * count for count in range(12)]
_THREE: Final = Struct("<3I")
_WORD: Final = np.dtype("<u8")
_STEP: Final = 0x9E3779B97F4A7C15
"""An odd number without a pattern (2⁶⁴ over the golden ratio)."""


def chunk_check(*values: Any) -> bytes:
    """The CRC of a row's values, of which the last is its content."""
    *place, content = values
    return zlib.crc32(_plain(content), _crc_of(place)).to_bytes(CRC_BYTES, "little")


def _crc_of(place: Sequence[Any], start: int = 0) -> int:
    """Of every value as text: numpy's integers have the digits of Python's."""
    return zlib.crc32((_FORMATS[len(place)] % tuple(place)).encode("utf-8", "surrogatepass"), start)


def _plain(content: str | bytes | None) -> bytes:
    return content.encode() if isinstance(content, str) else content or b""


def is_whole(checks: bytes | None, *values: Any, place: int = 0) -> bool:
    """Whether a row's values are those of the check at this place of `checks`; True of a row without checks."""
    start = place * CRC_BYTES
    return checks is None or checks[start : start + CRC_BYTES] == chunk_check(*values)


def damaged_rows(run_id: str, what: str) -> Damaged:
    """The error for rows that differ from what was written."""
    return Damaged(
        f"run {run_id}: {what} is damaged in the database, its checksum differs: ask for other steps, or restore a "
        "back-up"
    )


def report_checks(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with the checks of a row of the journal."""
    # As `chunk_check` of each part, but what they have in common goes in once.
    place = _crc_of((row["run_id"], row["stream_id"], row["seq"], row["step"], row["time"]))
    of_model = _crc_of((row["parts"], row["statistic_count"]), place)
    starts = (place, of_model, _crc_of((row["layer_count"],), of_model))
    checks = (zlib.crc32(_plain(row[part]), start) for part, start in zip(REPORT_PARTS, starts, strict=True))
    return {"step_check": -1 - row["step"], "checks": _THREE.pack(*checks)}


def or_damaged(of_steps: ColumnElement[bool]) -> ColumnElement[bool]:
    """A condition on steps of reports that also takes those whose step is damaged: whoever reads them notices."""
    return or_(of_steps, schema.report.c.step_check != -1 - schema.report.c.step)


def require_report(checks: bytes | None, part: str, values: Sequence[Any]) -> None:
    """Compare a part of a report (the name of its content's column) with its check.

    Raises:
        Damaged: they differ.
    """
    run_id, stream_id, seq, step = values[:4]
    if not is_whole(checks, *values, place=_PLACES[part]):
        raise damaged_rows(run_id, f"report {seq} of stream {stream_id}, step {step},")


def chunk_name(level: int, chunk: int, part: int, first_step: int, last_step: int) -> str:
    """What an error calls a part of a chunk."""
    return f"part {part} of chunk {chunk} at level {level}, steps {first_step} to {last_step},"


def point_checks(row: Mapping[str, Any]) -> bytes:
    """The checks of a row of `point_chunk`: of its points, and of who contributed."""
    return b"".join(chunk_check(*map(row.__getitem__, names)) for names in _POINT_PARTS)


def require_points(row: Any, *, contributors: bool = False) -> None:
    """Compare a row of `point_chunk` with its checks.

    Raises:
        Damaged: they differ.
    """
    for place, names in enumerate(_POINT_PARTS if contributors else _POINT_PARTS[:1]):
        if not is_whole(row.checks, *(getattr(row, name) for name in names), place=place):
            what = chunk_name(row.level, row.chunk, row.part, row.first_step, row.last_step)
            raise damaged_rows(row.run_id, what)


def whole_logged(row: Any) -> Any:
    """A row of `scalar_chunk`, once it is compared with its check.

    Raises:
        Damaged: they differ.
    """
    if not is_whole(row.checks, *(getattr(row, name) for name in LOGGED_PARTS)):
        raise damaged_rows(row.run_id, f"part {row.part} of {row.name!r} as stream {row.stream_id} logged it")
    return row


def whole_of(connection: Connection, statement: Select[Any], table: Table) -> tuple[list[Row[Any]], list[str]]:
    """The rows of a statement on one table that are whole, in its order, and what is wrong with the others.

    Only if one is damaged is each read alone. What is wrong is logged, once an hour.
    """
    try:
        return list(whole_rows(table, connection.execute(statement).all())), []
    except (Damaged, TypeError, ValueError):
        pass  # The driver raises the last two when a number became a text.
    except DatabaseError as error:
        if damage_behind(error) is None:
            raise
    found: list[Row[Any]] = []
    damaged: list[str] = []
    keys = list(table.primary_key.columns)
    for place in connection.execute(statement.with_only_columns(*keys)).all():
        mine = [key == value for key, value in zip(keys, place, strict=True)]
        try:
            [row] = whole_rows(table, connection.execute(select(table).where(*mine)).all())
            found.append(row)
        except Damaged as error:
            damaged.append(error.message)
        except (DatabaseError, TypeError, ValueError) as error:
            damaged.append(f"{_row_name(table, place)} cannot be read ({error}): restore a back-up")
    for message in damaged:
        tell_damage(message)
    return found, damaged


@cached(TTLCache(1_000, 3600.0), lock=Lock())
def tell_damage(message: str) -> None:
    """Log a row that an answer leaves out, once an hour."""
    _LOG.error("left out: %s", message)


def _row_name(table: Table, key: Iterable[Any]) -> str:
    place = ", ".join(f"{column.name} {value!r}" for column, value in zip(table.primary_key, key, strict=True))
    return f"the row of `{table.name}` with {place}"


def require_row(table: Table, row: Row[Any], groups: Iterable[int] | None = None, checks: str = "checks") -> None:
    """Compare groups of a row's columns with its checks; of all columns, where none are given.

    checks: the name of the column of checks in the row.

    Raises:
        Damaged: they differ.
    """
    held, values = getattr(row, checks), row._mapping
    if held is None:
        return
    for group in range(len(groups_of(table))) if groups is None else groups:
        if not isinstance(held, bytes) or part_of(held, group) != group_check(table, group, values):
            what = _row_name(table, [values[column.name] for column in table.primary_key])
            if "run_id" in table.primary_key:
                raise damaged_rows(row.run_id, what)
            raise Damaged(f"{what} is damaged in the database, its checksum differs: restore a back-up")


def is_row_whole(table: Table, row: Row[Any], groups: Iterable[int] | None = None) -> bool:
    """Whether the groups are as they were written; one that is not is logged, once an hour."""
    try:
        require_row(table, row, groups)
    except Damaged as error:
        tell_damage(error.message)
        return False
    return True


def whole_rows(
    table: Table, rows: Iterable[Row[Any]], groups: Iterable[int] | None = None, checks: str = "checks"
) -> Iterator[Row[Any]]:
    """The rows, each once `require_row` has compared it."""
    for row in rows:
        require_row(table, row, groups, checks)
        yield row


def update_rows(
    connection: Connection, table: Table, values: Mapping[str, Any], *where: ColumnElement[bool]
) -> int:
    """Change rows that tell of runs, and their checks; how many.

    Raises:
        Damaged: one of them is damaged: other checks would hide it.
    """
    rows = connection.execute(select(table).where(*where).with_for_update()).all()
    for row in whole_rows(table, rows):
        mine = (column == row._mapping[column.name] for column in table.primary_key.columns)
        changed = {**values, "checks": checks_of(table, {**row._mapping, **values})}
        connection.execute(update(table).where(*mine).values(changed))
    return len(rows)


def whole_runs(
    read: Callable[[Sequence[str]], Mapping[str, _Told]], run_ids: Sequence[str]
) -> tuple[dict[str, _Told], list[wire.DamagedRun]]:
    """The outcome of `read` for those runs that can be read, and what is wrong with the others.

    All are read at once; only if one is damaged, each alone.
    """
    try:
        return dict(read(run_ids)), []
    except Damaged as error:
        damaged = error
    except DatabaseError as error:
        if (found := damage_behind(error)) is None:
            raise
        damaged = found
    if len(run_ids) == 1:
        [run_id] = run_ids
        message = damaged.message if run_id in damaged.message else f"run {run_id}: {damaged.message}"
        return {}, [wire.DamagedRun(run_id=run_id, message=message)]
    alone = [whole_runs(read, [run_id]) for run_id in run_ids]
    return {key: told for one, _ in alone for key, told in one.items()}, [one for _, some in alone for one in some]


def layer_checks(data: bytes, *place: Any) -> bytes:
    """A check of eight bytes for each layer of totals [layers, points], since a slice of them is read alone.

    place: the row's, of which the last two are the numbers of points and of layers.
    """
    words = np.frombuffer(data, dtype=_WORD).reshape(place[-1], place[-2])
    return _layer_words(words, 0, place).astype(_WORD).tobytes()


def are_layers_whole(checks: bytes | None, words: NDArray[Any], first: int, *place: Any) -> bool:
    """Whether consecutive layers from `first` on are what was written; True where nothing was written about it."""
    if checks is None:
        return True
    if len(checks) != CHECK_BYTES * len(words):
        return False
    return np.array_equal(np.frombuffer(checks, dtype=_WORD), _layer_words(words.view(_WORD), first, place))


def _layer_words(words: NDArray[np.uint64], first: int, place: Sequence[Any]) -> NDArray[np.uint64]:
    """Σ weight·word modulo 2⁶⁴: weights are odd, so that no single changed word leaves the sum as it is.

    Four times as fast as a CRC of each layer.
    """
    start = int.from_bytes(chunk_check(*place, b""), "little")
    layers = np.arange(first, first + len(words), dtype=np.uint64)
    seed = (layers * np.uint64(2**32) + np.uint64(start)) * np.uint64(_STEP)
    return words @ _weights(words.shape[1]) + seed


@cache
def _weights(count: int) -> NDArray[np.uint64]:
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    return (numbers ^ (numbers >> np.uint64(29))) | np.uint64(1)
