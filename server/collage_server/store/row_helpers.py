"""Row helpers shared in the store: conversions, sets of report numbers, existence checks, deletions.

Only modules of `store/` use it, and it knows no table but `run`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Row, Table, bindparam, case, delete, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DatabaseError

from collage_monitor.wire import Number, to_number
from collage_server.errors import Damaged, Gone, NotFound, unknown_run
from collage_server.store import schema

__all__ = [
    "Ranges",
    "add_numbers",
    "add_ranges",
    "among",
    "contains",
    "count_numbers",
    "damage_behind",
    "delete_slice",
    "from_json",
    "given_rows",
    "insert_into",
    "int_array",
    "int_bytes",
    "later",
    "missing_run",
    "ranges_from_json",
    "ranges_to_json",
    "require_run",
    "require_runs",
    "rows_given",
    "scalars_from_json",
    "scalars_to_json",
    "shape_of",
    "to_json",
]

_INSERT: Final[dict[str, Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_LITTLE = np.dtype("<i8")
_ENCODE = msgspec.json.Encoder().encode
_DECODE_SCALARS = msgspec.json.Decoder(dict[str, Number]).decode


def insert_into(connection: Connection, table: Table) -> Any:
    """The INSERT of this database, which knows ON CONFLICT; SQLAlchemy's own does not."""
    return _INSERT[connection.dialect.name](table)


def to_json(value: Any) -> str:
    """Any plain value or message as JSON text."""
    return _ENCODE(value).decode()


def from_json(text: str) -> Any:
    """The plain value behind JSON text."""
    return msgspec.json.decode(text)


def scalars_to_json(scalars: dict[str, float]) -> str:
    """Logged values as JSON text; non-finite ones as the strings of the wire."""
    if not all(map(math.isfinite, scalars.values())):
        return to_json({name: to_number(value) for name, value in scalars.items()})
    return to_json(scalars)


def scalars_from_json(text: str) -> dict[str, float]:
    """Logged values behind their JSON text."""
    return {name: float(value) for name, value in _DECODE_SCALARS(text).items()}


def int_bytes(values: NDArray[np.int64]) -> bytes:
    """Integers as little-endian int64."""
    return np.ascontiguousarray(values, dtype=_LITTLE).tobytes()


def int_array(data: bytes) -> NDArray[np.int64]:
    """Integers behind little-endian int64."""
    return np.frombuffer(data, dtype=_LITTLE).astype(np.int64, copy=False)


def among(column: ColumnElement[Any], name: str = "run_ids") -> ColumnElement[bool]:
    """Whether the column is one of a list that is given when the statement is executed.

    A statement that is made once costs a question of 25 statements half of the CPU that it costs made again.
    """
    return column.in_(bindparam(name, expanding=True))


def given_rows(dialect: str, names: Sequence[str], shape: int) -> str:
    """A common table `w` of rows that `rows_given` gives when the statement is executed; shape: `shape_of` them.

    A statement for each number of rows would be kept by SQLAlchemy and by SQLite, hundreds of them, and of
    thousands of marks each takes megabytes. SQLite reads any number as JSON. PostgreSQL plans arrays worse: they
    took half as much CPU again as VALUES, so there a statement has a power of two of rows.
    """
    if dialect == "sqlite":
        values = ", ".join(f"json_extract(value, '$[{place}]') AS {name}" for place, name in enumerate(names))
        return f"w AS MATERIALIZED (SELECT {values} FROM json_each(:rows))"
    marks = iter(range(shape * len(names)))
    rows = ", ".join(f"({', '.join(f':v{next(marks)}' for _ in names)})" for _ in range(shape))
    return f"w ({', '.join(names)}) AS (VALUES {rows})"


def shape_of(dialect: str, rows: Sequence[Sequence[Any]]) -> int:
    """Which statement takes so many rows."""
    return 0 if dialect == "sqlite" else 1 << (len(rows) - 1).bit_length()


def rows_given(dialect: str, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The parameters of `given_rows`; rows that are added to fill the shape have empty texts and zeros."""
    if dialect == "sqlite":
        return {"rows": to_json(rows)}
    empty = ["" if isinstance(value, str) else 0 for value in rows[0]]
    filled = [*rows, *[empty] * (shape_of(dialect, rows) - len(rows))]
    return {f"v{place}": value for place, value in enumerate(value for row in filled for value in row)}


def later(one: ColumnElement[Any], other: ColumnElement[Any]) -> ColumnElement[float]:
    """The later of two times; `one` where the other is null."""
    return case((other > one, other), else_=one)


def delete_slice(connection: Connection, table: Table, *where: ColumnElement[bool], rows: int) -> int:
    """Delete at most so many of the rows that meet the conditions; how many went."""
    key = list(table.primary_key.columns)
    chosen = select(*key).where(*where).limit(rows)
    return connection.execute(delete(table).where(*where, tuple_(*key).in_(chosen))).rowcount


def require_newest_first(created_at: Sequence[float]) -> None:
    """Refuse runs that an index gives out of order: whoever reads page after page would never reach the end.

    Raises:
        Damaged: one run was created after the run before it.
    """
    if any(later > earlier for earlier, later in pairwise(created_at)):
        raise Damaged(
            "an index of the table `run` is damaged in the database, its order is wrong: collage-monitor archive "
            "verify makes it again"
        )


def damage_behind(error: DatabaseError) -> Damaged | None:
    """What SQLite finds damaged in its file; None for any other error."""
    if type(error) is not DatabaseError:
        return None
    return Damaged(f"the database's file is damaged ({error.orig}): restore a back-up")


def missing_run(connection: Connection, run_id: str) -> NotFound | Gone:
    """The error for a run that is not there: deleted, or never seen."""
    tomb = schema.deleted_run
    if connection.execute(select(tomb.c.run_id).where(tomb.c.run_id == run_id)).first():
        return Gone(f"run {run_id!r} was deleted; start a new run with a new run_id", field="run_id")
    return unknown_run(run_id)


def require_run(connection: Connection, run_id: str, *names: str, lock: bool = False) -> Row[Any]:
    """These columns of a run that exists; `lock` keeps others from changing it in this transaction.

    Raises:
        NotFound, Gone: the run is not there.
    """
    columns = [schema.run.c[name] for name in names or ("run_id",)]
    statement = select(*columns).where(schema.run.c.run_id == run_id)
    row = connection.execute(statement.with_for_update() if lock else statement).first()
    if row is None:
        raise missing_run(connection, run_id)
    return row


def require_runs(connection: Connection, run_ids: Collection[str]) -> None:
    """Raise NotFound or Gone unless all these runs exist."""
    if not run_ids:
        return
    there = set(connection.execute(select(schema.run.c.run_id).where(schema.run.c.run_id.in_(run_ids))).scalars())
    for run_id in run_ids:
        if run_id not in there:
            raise missing_run(connection, run_id)


Ranges = Sequence[tuple[int, int]]
"""Sets of report numbers, such as those that left the journal for chunks: sorted, disjoint, not
adjacent (first, last), both inclusive."""

_DECODE_RANGES = msgspec.json.Decoder(list[tuple[int, int]]).decode


def ranges_from_json(text: str) -> list[tuple[int, int]]:
    """The ranges behind their text."""
    return _DECODE_RANGES(text)


def ranges_to_json(ranges: Ranges) -> str:
    """Ranges as text, [[first, last], …]."""
    return msgspec.json.encode(ranges).decode()


def contains(ranges: Ranges, number: int) -> bool:
    """Whether one of the ranges holds the number."""
    if not ranges or number > ranges[-1][1]:
        return False
    index = bisect_left(ranges, (number + 1,)) - 1
    return index >= 0 and number <= ranges[index][1]


def add_numbers(ranges: Ranges, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The ranges with these numbers added."""
    return add_ranges(ranges, ((number, number) for number in numbers))


def add_ranges(ranges: Ranges, added: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges with others added, which may overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*ranges, *added]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def count_numbers(ranges: Ranges) -> int:
    """How many numbers the ranges hold."""
    return sum(last - first + 1 for first, last in ranges)
