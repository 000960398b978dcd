"""The check of a SQLite database as a whole: its structure, its indexes, each row that has checks.

Readers notice a damaged row themselves. What they cannot notice is a row that a damaged index does not lead to:
indexes that differ from their tables are made again from them. A damaged row is healed if the newest back-up has it
as it was written: with the same checks, which it meets.

Maintenance calls it soon after the server's start and once a day, `archive verify` at once
(`tests/server/store/test_database_check.py`). PostgreSQL has checksums of its own.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from sqlalchemy import Row, Select, Table, delete, literal_column, select, text, update
from sqlalchemy.exc import DatabaseError

from collage_server.errors import Busy, Damaged
from collage_server.store import schema
from collage_server.store.archive.segments import footer_of
from collage_server.store.engine.database import Database
from collage_server.store.row_checks import (
    LAYER_PLACE,
    MODEL_PARTS,
    REPORT_PARTS,
    are_layers_whole,
    damaged_rows,
    is_whole,
    require_points,
    require_report,
    require_row,
    whole_logged,
)

__all__ = ["DatabaseCheck", "check_database"]

_LOG: Final = logging.getLogger(__name__)
_ROWS_AT_ONCE: Final = 64
"""In one transaction: nobody waits for it, and the write-ahead log stays short."""


class DatabaseCheck(NamedTuple):
    """The outcome: rows that were read and healed, and what is still damaged, each with the run."""

    rows: int
    healed: int
    damaged: tuple[str, ...]


def check_database(database: Database, backup: Path | None, goes_on: Callable[[], bool]) -> DatabaseCheck:
    """Check the whole database, and heal what can be healed.

    backup: the newest one, if there is any. goes_on: is asked after every few rows, and ends the check with False.
    """
    found, healed = 0, 0
    damaged: list[str] = []
    structure = _structure(database)
    for table in (table for table in schema.metadata.sorted_tables if "checks" in table.c):
        for row in _rows(database, table, damaged):
            found += 1
            if found % _ROWS_AT_ONCE == 0 and not goes_on():
                return DatabaseCheck(found, healed, tuple(damaged))
            problem = _problem_of(table, row)
            if problem is not None and (how := _heal(database, table, row, backup)):
                _LOG.error("%s; it is %s", problem, how)
                healed += 1
            elif problem is not None:
                _LOG.error("%s", problem)
                damaged.append(problem)
    if structure is not None:
        # An index made again from a damaged row would no longer lead to it.
        structure = _structure(database) if damaged else _with_new_indexes(database, structure)
    if structure is not None:
        damaged.append(f"the database's file: {structure}; restore a back-up")
        _LOG.error("%s", damaged[-1])
    return DatabaseCheck(found, healed, tuple(damaged))


def _problem_of(table: Table, row: Any) -> str | None:
    try:
        _require_whole(table, row)
    except Damaged as error:
        return error.message
    except (TypeError, ValueError) as error:
        # A number became a text, or bytes of another length.
        return f"a row of `{table.name}` is damaged in the database ({error}): restore a back-up"
    return None


def _heal(database: Database, table: Table, row: Row[Any], backup: Path | None) -> str | None:
    """Put the row as it was written in its place, and say how; None if the back-up has none. A run's summary
    goes: the server makes it again."""
    mine = (literal_column("rowid") == row.rowid, table.c.checks == row.checks)
    is_made_again = table is schema.run_summary
    good = None if backup is None or is_made_again else _copy_in(backup, table, row)
    if good is None and not is_made_again:
        return None
    try:
        with database.writing() as connection:
            connection.execute(
                delete(table).where(*mine) if good is None else update(table).where(*mine).values(good)
            )
    except (DatabaseError, Busy) as error:
        _LOG.error("a row of `%s` cannot be put right: %s", table.name, _reason(error))
        return None
    return "made again" if good is None else f"healed from {backup}"


def _with_new_indexes(database: Database, problem: str) -> str | None:
    """What is still wrong with the structure of the file once its indexes were made again from whole rows."""
    _LOG.error("the database is damaged (%s); its indexes are made again", problem)
    try:
        with database.writing() as connection:
            connection.execute(text("REINDEX"))
    except (DatabaseError, Busy) as error:
        _LOG.error("its indexes cannot be made again: %s", error)
    return _structure(database)


def _structure(database: Database) -> str | None:
    try:
        with database.reading() as connection:
            told = connection.execute(text("PRAGMA integrity_check(1)")).scalar_one()
    except (DatabaseError, Busy) as error:
        return _reason(error)
    return None if told == "ok" else str(told)


def _reason(error: Exception) -> str:
    """The driver's own words."""
    return str(getattr(error.__cause__ or error, "orig", error))


def _rows(database: Database, table: Table, unreadable: list[str]) -> Iterator[Row[Any]]:
    """The rows of a table with their `rowid`, a few in each transaction; adds those that cannot be read."""
    rowid: Any = literal_column("rowid").label("rowid")
    after = -(2**63)
    while True:
        some = select(rowid).select_from(table).where(rowid > after).order_by(rowid).limit(_ROWS_AT_ONCE)
        try:
            with database.reading() as connection:
                ids = list(connection.execute(some).scalars())
        except (DatabaseError, Busy) as error:
            unreadable.append(f"rows of `{table.name}` cannot be read: {_reason(error)}")
            return
        whole = select(rowid, table).order_by(rowid)
        try:
            yield from _read(database, whole.where(rowid.in_(ids)))
        except (DatabaseError, Busy):
            for one in ids:
                try:
                    yield from _read(database, whole.where(rowid == one))
                except (DatabaseError, Busy) as error:
                    unreadable.append(f"a row of `{table.name}` cannot be read: {_reason(error)}")
        if len(ids) < _ROWS_AT_ONCE:
            return
        if ids[-1] <= after:
            # A damaged page leads back to rows already read: without an end, if they were followed.
            unreadable.append(f"rows of `{table.name}` cannot be read: they are out of order; restore a back-up")
            return
        after = ids[-1]


def _read(database: Database, statement: Select[Any]) -> Sequence[Row[Any]]:
    with database.reading() as connection:
        return connection.execute(statement).all()


def _require_whole(table: Table, row: Any) -> None:
    """Compare a row of any table with its checks.

    Raises:
        Damaged: they differ.
    """
    if row.checks is None:
        return
    if table is schema.report:
        for part, names in REPORT_PARTS.items():
            require_report(row.checks, part, [getattr(row, name) for name in names])
    elif table is schema.point_chunk:
        require_points(row, contributors=True)
    elif table is schema.scalar_chunk:
        whole_logged(row)
    elif table is schema.segment:
        footer_of(row)
    elif table in (schema.model_chunk, schema.layer_chunk):
        _require_totals(table, row)
    else:
        require_row(table, row)


def _require_totals(table: Table, row: Any) -> None:
    if table is schema.model_chunk:
        whole = is_whole(row.checks, *(getattr(row, name) for name in MODEL_PARTS))
    else:
        place = [getattr(row, name) for name in LAYER_PLACE]
        numbers = row.point_count * row.layer_count
        whole = 0 < 8 * numbers == len(row.data) and are_layers_whole(
            row.checks, np.frombuffer(row.data, dtype="<f8").reshape(row.layer_count, -1), 0, *place
        )
    if not whole:
        raise damaged_rows(row.run_id, f"part {row.part} of chunk {row.chunk} at level {row.level}")


def _copy_in(backup: Path, table: Table, row: Row[Any]) -> dict[str, Any] | None:
    """The row as it was written, from a back-up: one with these checks, of which one column differs, and no other.

    None if that has no such row, or a damaged one.
    """
    names = table.c.keys()
    columns = ", ".join(f'"{name}"' for name in names)
    statement = f"SELECT {columns} FROM {table.name} WHERE checks = ?"
    try:
        with closing(sqlite3.connect(f"{backup.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute(statement, (row.checks,)).fetchall()
    except sqlite3.Error:
        return None
    alike = []
    for values in (dict(zip(names, entry, strict=True)) for entry in found):
        different = sum(values[name] != row._mapping[name] for name in names)
        if different == 1 and _problem_of(table, SimpleNamespace(**values, _mapping=values)) is None:
            alike.append(values)
    return alike[0] if len(alike) == 1 else None
