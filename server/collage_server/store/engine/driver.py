"""Statements on the driver's own cursor: compiled once, for the path that every report takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Final

from sqlalchemy import Connection, Dialect
from sqlalchemy.exc import DataError, InternalError, OperationalError
from sqlalchemy.sql.expression import ClauseElement

__all__ = ["Statement", "driver_cursor", "reads_only"]

_READS_ONLY: Final = "25006"


class Statement:
    """A statement's text in one dialect, and its parameters as that dialect's driver takes them."""

    def __init__(self, statement: ClauseElement, dialect: Dialect) -> None:
        compiled: Any = statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
        self.text = str(compiled)
        self._order: Sequence[str] | None = compiled.positiontup if compiled.positional else None

    def bind(self, values: Mapping[str, Any]) -> Any:
        """Parameters by name as the driver takes them: in the text's order, or by name."""
        return values if self._order is None else [values[name] for name in self._order]


def reads_only(error: BaseException | None) -> bool:
    """Whether PostgreSQL says that the session only reads: after a failover it is of no use."""
    return getattr(error, "sqlstate", None) == _READS_ONLY


@contextmanager
def _translate_driver_errors(connection: Connection) -> Iterator[None]:
    """Raise the driver's errors as SQLAlchemy's.

    After a lost connection the pool's other ones are given up, too: they went to the same server.
    """
    errors: Any = connection.dialect.loaded_dbapi
    driver: Any = connection.connection
    try:
        yield
    except (errors.OperationalError, errors.InternalError) as error:
        lost = connection.dialect.is_disconnect(error, driver.dbapi_connection, None)
        if lost or reads_only(error):
            connection.invalidate(error)
            connection.engine.dispose()
        kind = OperationalError if isinstance(error, errors.OperationalError) else InternalError
        raise kind(None, None, error) from error
    except errors.DataError as error:
        raise DataError(None, None, error) from error


@contextmanager
def driver_cursor(connection: Connection) -> Iterator[Any]:
    """The driver's own cursor in a transaction of `Database.appending`; "COMMIT" may be its last statement.

    On PostgreSQL in pipeline mode: statements are sent as they come, and awaited where rows are fetched and when
    the context ends.
    """
    driver: Any = connection.connection.dbapi_connection
    pipelined = connection.dialect.name == "postgresql"
    pipeline = driver.pipeline() if pipelined else nullcontext()
    with _translate_driver_errors(connection), pipeline, closing(driver.cursor()) as cursor:
        if pipelined:
            cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        yield cursor
