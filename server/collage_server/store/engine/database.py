"""An SQL database: its engine, and the transactions in which everything is read and written."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Final

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DataError, InternalError, OperationalError

from collage_server.errors import Busy, StoreUnusable, Unprocessable
from collage_server.store.records import CONNECTIONS, Sizes

__all__ = ["POOL", "Database"]

_LOG: Final = logging.getLogger(__name__)
POOL: Final = {"pool_size": 10, "max_overflow": CONNECTIONS - 10}


@contextmanager
def _translated() -> Iterator[None]:
    """What a database says, in this server's words: gone for a moment, or a value that it cannot hold."""
    try:
        yield
    except (OperationalError, InternalError) as error:
        # Its own words name hosts and addresses: they are for the log.
        _LOG.warning("the database cannot do this now: %s", error.orig)
        raise Busy("the database cannot do this now; send this again later", retry_after_seconds=5) from error
    except DataError as error:
        raise Unprocessable(f"the database cannot hold a value: {error.orig}; send plain text") from error


class Database(ABC):
    """Reads see one snapshot each, writes are one transaction each. A backend adds its dialect."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._seal_lock = Lock()

    @abstractmethod
    def _connect(self) -> Engine:
        """An engine on the database, its file or cluster made ready."""

    @abstractmethod
    def _prepare_schema(self) -> None:
        """Bring the schema up to date, or refuse to work on another one."""

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
        """On a full disk, free the space that is held for what gives space back."""

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
        with _translated(), self._begin_reading() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A write transaction, committed durably on leaving."""
        with _translated(), self._begin_writing() as connection:
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
        with _translated(), self._begin_appending() as connection:
            yield connection

    @contextmanager
    def claimed(self, run_id: str) -> Iterator[bool]:
        """Whether this thread alone changes the run's chunks, as long as the context lasts."""
        with self._seal_lock, self._claim(run_id) as mine:
            yield mine

    @contextmanager
    def writing_claimed(self) -> Iterator[Connection]:
        """A write transaction for whoever claimed a run: not committed once the claim is lost."""
        with self.writing() as connection:
            yield connection
            self._require_claim()
