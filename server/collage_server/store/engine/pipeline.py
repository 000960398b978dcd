"""Statements that go to PostgreSQL together and are answered together: the way of a commit of reports.

A round trip for each statement, and the driver's own work around each, would cost more than what they do.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import psycopg
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from sqlalchemy import Connection

from collage_server.store.engine.driver import told_by_sqlalchemy

__all__ = ["PipelineCursor", "array", "forget_prepared", "pipeline_cursor"]

_FAILED: Final = (ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED)
_HEAD: Final = struct.Struct("!5i").pack
_LENGTH: Final = struct.Struct("!i").pack
_NULL: Final = _LENGTH(-1)
_ELEMENTS: Final[dict[str, tuple[int, Callable[[Any], bytes]]]] = {
    "text": (25, str.encode),
    "bigint": (20, struct.Struct("!q").pack),
    "int": (23, struct.Struct("!i").pack),
    "float8": (701, struct.Struct("!d").pack),
    "bytea": (17, bytes),
}
"""By type: its number in every PostgreSQL, and what makes a value's binary form."""
_NAMES: Final = count()
_PREPARED: Final = "prepared statements"


def array(kind: str, values: Sequence[Any]) -> bytes:
    """A list as PostgreSQL's array of this type, in binary: one dimension, counted from 1, None is NULL."""
    number, pack = _ELEMENTS[kind]
    parts = [_HEAD(1, 1, number, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            packed = pack(value)
            parts += (_LENGTH(len(packed)), packed)
    return b"".join(parts)


class PipelineCursor:
    """What a commit needs of a cursor: statements are sent as they come, and awaited where an answer is asked for.

    `prepared` holds the connection's prepared statements, name by text; they outlive the cursor. Parameters are
    numbered, and their types follow from the text.
    """

    def __init__(self, connection: psycopg.Connection[Any], prepared: dict[str, bytes]) -> None:
        self._libpq = connection.pgconn
        self._transformer = Transformer(connection)
        self._prepared = prepared
        self._awaited = False

    def begin(self) -> None:
        """Open a transaction unless there is one."""
        self._libpq.enter_pipeline_mode()
        if self._libpq.transaction_status == TransactionStatus.IDLE:
            self.execute("BEGIN")

    def execute(self, text: str, values: Sequence[Any] = ()) -> None:
        """Send a statement."""
        self._awaited = True
        name = self._prepared.get(text)
        if name is None:
            name = self._prepared[text] = b"collage_%d" % next(_NAMES)
            self._libpq.send_prepare(name, text.encode())
        sent, formats = zip(*map(_parameter, values), strict=True) if values else ((), ())
        self._libpq.send_query_prepared(name, sent, formats)

    def executemany(self, text: str, many: Sequence[Sequence[Any]]) -> None:
        """Send a statement once for each of these values."""
        for values in many:
            self.execute(text, values)

    def commit(self) -> None:
        """Send the transaction's end together with what waits; its owner then finds nothing left to commit."""
        self.execute("COMMIT")

    def fetchall(self) -> list[tuple[Any, ...]]:
        """The rows of the last statement; raises what any since the last call has failed with."""
        result = self.wait()[-1]
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def wait(self) -> list[PGresult]:
        """Every answer that is still to come."""
        results = list(self._answers())
        for result in results:
            if result.status in _FAILED:
                raise error_from_result(result)
        return results

    def close(self) -> None:
        """Leave the connection to others, as long as it lives."""
        if self._libpq.status == ConnStatus.OK:
            for _ in self._answers():
                pass
            self._libpq.exit_pipeline_mode()

    def _answers(self) -> Iterator[PGresult]:
        """Whoever waits here lets other threads run."""
        if not self._awaited:
            return
        libpq = self._libpq
        libpq.pipeline_sync()
        readable = select.poll()
        readable.register(libpq.socket, select.POLLIN)
        either = select.poll()
        either.register(libpq.socket, select.POLLIN | select.POLLOUT)
        while libpq.flush():
            either.poll()
            libpq.consume_input()
        while True:
            while libpq.is_busy():
                readable.poll()
                libpq.consume_input()
            result = libpq.get_result()
            if result is None:
                if libpq.status != ConnStatus.OK:
                    raise psycopg.OperationalError("the connection to PostgreSQL was lost")
            elif result.status == ExecStatus.PIPELINE_SYNC:
                self._awaited = False
                return
            else:
                yield result


def _parameter(value: Any) -> tuple[bytes | None, int]:
    """As the server takes it, and whether that is binary: text too, so that no character ends it."""
    if isinstance(value, bytes):
        return value, 1
    if isinstance(value, str):
        return value.encode(), 1
    return None if value is None else str(value).encode(), 0


@contextmanager
def pipeline_cursor(connection: Connection) -> Iterator[PipelineCursor]:
    """A cursor in the connection's transaction, which it may open; when it is left, all has been done.

    After an error no statement counts as prepared: those behind it were skipped.
    """
    driver: Any = connection.connection
    prepared: dict[str, bytes] = driver.info.setdefault(_PREPARED, {})
    with told_by_sqlalchemy(connection):
        cursor = PipelineCursor(driver.dbapi_connection, prepared)
        try:
            cursor.begin()
            yield cursor
            cursor.wait()
        except BaseException:
            prepared.clear()
            raise
        finally:
            with _given_up_on_error(connection):
                cursor.close()


@contextmanager
def _given_up_on_error(connection: Connection) -> Iterator[None]:
    """In the middle of a pipeline nobody could use a connection: answers would be taken for those of others."""
    try:
        yield
    except BaseException:
        connection.invalidate()
        raise


def forget_prepared(connection: Connection) -> None:
    """For the engine's event "rollback": the driver then has the server forget every prepared statement."""
    if not connection.invalidated:
        connection.connection.info.pop(_PREPARED, None)
