"""An SQL database: its engine, the transactions in which all is read and written, the driver's own cursor.

`store.Store` derives from `Database`, and `SqliteStore` and `PostgresqlStore` from that: they say how it connects,
how a transaction begins, and who may seal a run (a claim).

Everything in `store/` takes its transactions here. A third database would be a third subclass, under the same
contract suite (`tests/server/store/contract.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from threading import Lock
from typing import Any, Final

from sqlalchemy import Connection, Dialect, Engine, text
from sqlalchemy.exc import DatabaseError, DataError, InternalError, OperationalError
from sqlalchemy.sql.expression import ClauseElement

from collage_server.dependencies import Dependency
from collage_server.errors import DatabaseAway, StoreUnusable, Unprocessable
from collage_server.store.records import CONNECTIONS, Sizes
from collage_server.store.row_helpers import damage_behind

__all__ = ["ARCHIVE", "Database", "POOL", "Statement", "driver_cursor", "reads_only"]

ARCHIVE: Final = "archive"
"""The execution option under which a store's connections know what reads archived files."""

_READS_ONLY: Final = "25006"
POOL: Final = {"pool_size": 10, "max_overflow": CONNECTIONS - 10}


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

    After a lost connection the pool's other ones are closed, too, because they lead to the same server.
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


class Database(ABC):
    """Reads see one snapshot each, writes are one transaction each. A backend adds its dialect."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._seal_lock = Lock()
        self.dependency = Dependency("the database")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translates database errors into this server's errors: away for now, or a value that it cannot hold."""
        try:
            yield
        except DataError as error:
            raise Unprocessable(f"the database cannot hold a value: {error.orig}; send plain text") from error
        except DatabaseError as error:
            if (damaged := damage_behind(error)) is not None:
                raise damaged from error
            if not isinstance(error, OperationalError | InternalError):
                raise
            # The error's own text names hosts and addresses: it goes to the log only.
            self.dependency.fails(str(error.orig))
            raise DatabaseAway(
                "the database cannot do this now; send this again later", retry_after_seconds=5
            ) from error
        if self.dependency.away_since is not None:
            self.dependency.works()

    @abstractmethod
    def _connect(self) -> Engine:
        """An engine on the database, its file or cluster made ready."""

    @abstractmethod
    def _prepare_schema(self) -> None:
        """Bring the schema up to date, or refuse to work on another one."""

    def time(self, connection: Connection, now: float) -> float:
        """The time by which servers on this database agree: `now`, where all of them share one machine's clock."""
        return now

    def own_time(self) -> float | None:
        """The time of the database's own clock; None where that is the machine's."""
        return None

    def place(self, connection: Connection) -> str:
        """An id that distinguishes this database from its copies; empty if there is none."""
        return ""

    @abstractmethod
    def _begin_reading(self) -> AbstractContextManager[Connection]:
        """A read transaction on one snapshot."""

    @abstractmethod
    def _begin_writing(self) -> AbstractContextManager[Connection]:
        """A write transaction, committed durably on leaving."""

    def _begin_appending(self) -> AbstractContextManager[Connection]:
        """The same for `driver_cursor`, which may begin and commit it itself."""
        return self._begin_writing()

    @abstractmethod
    def _claim(self, run_id: str) -> AbstractContextManager[bool]:
        """Whether this process may seal the run, as long as the context lasts."""

    @abstractmethod
    def _require_claim(self) -> None:
        """Raise if the claim that this thread holds has been lost."""

    @abstractmethod
    def lock_project(self, connection: Connection, project: str) -> None:
        """Keep others from adding runs or tags to the project in this transaction."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """How much space there is."""

    @abstractmethod
    def make_room(self) -> None:
        """On a full disk, release the space held for operations that free space."""

    @abstractmethod
    def keep_room(self) -> None:
        """Hold that space, now that the disk has it."""

    @abstractmethod
    def checkpoint_log(self, *, read_only: bool = False) -> None:
        """Keep the database's log short, and empty while nothing may be stored."""

    @abstractmethod
    def release_space(self) -> bool:
        """Give a slice of free space back to the disk; True if there is more."""

    @property
    def engine(self) -> Engine:
        """The engine; the database must be open."""
        if self._engine is None:
            raise StoreUnusable("the store is not open")
        return self._engine

    def open(self) -> None:
        """Open the database and bring its schema up to date; an open one stays as it is."""
        if self._engine is not None:
            return
        self._engine = self._connect()
        try:
            self._prepare_schema()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every connection."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def check(self) -> None:
        """Raise if the database does not answer."""
        with self.reading() as connection:
            connection.execute(text("SELECT 1"))

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read transaction on one snapshot."""
        with self._translated(), self._begin_reading() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A write transaction, committed durably on leaving."""
        with self._translated(), self._begin_writing() as connection:
            yield connection

    @contextmanager
    def freeing(self) -> Iterator[Connection]:
        """A write transaction that gives space back: it works on a full disk, too."""
        self.make_room()
        with self.writing() as connection:
            yield connection

    @contextmanager
    def appending(self) -> Iterator[Connection]:
        """A write transaction whose first statements go through `driver_cursor`."""
        with self._translated(), self._begin_appending() as connection:
            yield connection

    @contextmanager
    def claimed(self, run_id: str) -> Iterator[bool]:
        """Whether this thread alone changes the run's chunks, as long as the context lasts."""
        with self._translated(), self._seal_lock, self._claim(run_id) as mine:
            yield mine

    @contextmanager
    def writing_claimed(self) -> Iterator[Connection]:
        """A write transaction under the claim on a run; it is not committed once the claim is lost."""
        with self.writing() as connection:
            yield connection
            self._require_claim()
