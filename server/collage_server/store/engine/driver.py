"""Statements on the driver's own cursor: compiled once, for the path that every report takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.exc import DataError, OperationalError
from sqlalchemy.sql.expression import ClauseElement

__all__ = ["Statement", "driver_cursor", "told_by_sqlalchemy"]


class Statement:
    """A statement's text in one dialect, and its parameters as that dialect's driver takes them."""

    def __init__(self, statement: ClauseElement, dialect: Dialect) -> None:
        compiled: Any = statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
        self.text = str(compiled)
        self._order: Sequence[str] | None = compiled.positiontup if compiled.positional else None

    def bind(self, values: Mapping[str, Any]) -> Any:
        """Parameters by name as the driver takes them: in the text's order, or by name."""
        return values if self._order is None else [values[name] for name in self._order]


@contextmanager
def told_by_sqlalchemy(connection: Connection) -> Iterator[None]:
    """What the driver raises is told as SQLAlchemy tells it.

    After a lost connection the pool's other ones are given up, too: they went to the same server.
    """
    errors: Any = connection.dialect.loaded_dbapi
    driver: Any = connection.connection
    try:
        yield
    except errors.OperationalError as error:
        if connection.dialect.is_disconnect(error, driver.dbapi_connection, None):
            connection.invalidate(error)
            connection.engine.dispose()
        raise OperationalError(None, None, error) from error
    except errors.DataError as error:
        raise DataError(None, None, error) from error


@contextmanager
def driver_cursor(connection: Connection) -> Iterator[Any]:
    """The driver's own cursor in the connection's transaction."""
    driver: Any = connection.connection
    with told_by_sqlalchemy(connection), closing(driver.cursor()) as cursor:
        yield cursor
