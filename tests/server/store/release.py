"""A database as the last revision before the baseline left it, and what its own server answered about its rows."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from pathlib import Path

from sqlalchemy import LargeBinary, MetaData, Table, bindparam, insert, text

__all__ = ["as_released", "holds", "read_release"]

_FILE = Path(__file__).parent / "release_0015.json.gz"


def holds(answer, known):
    """Whether an answer says all that the older server said, bit for bit; it may say more."""
    if isinstance(known, dict):
        return isinstance(answer, dict) and all(key in answer and holds(answer[key], known[key]) for key in known)
    if isinstance(known, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(known)
            and all(holds(one, other) for one, other in zip(answer, known, strict=True))
        )
    return answer == known


@cache
def read_release():
    """`schema`, statements by dialect; `tables`, rows by table; `answers` by path."""
    return json.loads(gzip.decompress(_FILE.read_bytes()))


def as_released(store):
    """The store's database as that revision left it; the store stays closed."""
    held = read_release()
    engine = store._connect()
    with engine.begin() as connection:
        for statement in held["schema"][connection.dialect.name]:
            connection.exec_driver_sql(statement)
        if connection.dialect.name == "sqlite":
            connection.execute(text("INSERT INTO alembic_version VALUES ('0015')"))
        _insert_rows(connection, held["tables"])
    engine.dispose()


def _insert_rows(connection, tables):
    """The release's rows into its own schema, as that schema stands in the database."""
    for name, rows in tables.items():
        table = Table(name, MetaData(), autoload_with=connection)
        binary = {column.name for column in table.columns if isinstance(column.type, LargeBinary)}
        if rows:
            values = [
                {key: base64.b64decode(v) if key in binary and v is not None else v for key, v in row.items()}
                for row in rows
            ]
            connection.execute(
                insert(table).values({key: bindparam(f"b_{key}") for key in rows[0]}), _bound(values)
            )


def _bound(rows):
    """Names that are no column's: some columns are called like SQL's own words."""
    return [{f"b_{key}": value for key, value in row.items()} for row in rows]
