"""PostgreSQL: any number of servers on one database, nothing shared but it.

It only says how PostgreSQL differs from `engine.Database`: connections, locks, claims. The same contract suite runs
on both databases (`tests/server/store/contract.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, func, make_url, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import ArgumentError, OperationalError, ProgrammingError

from collage_monitor.backoff import Backoff
from collage_server.errors import StoreUnusable
from collage_server.store import schema
from collage_server.store.archive.file_storage import ArchiveFiles
from collage_server.store.engine.database import POOL, reads_only
from collage_server.store.migrate import check_revision, current_revision, head_revision, migrate
from collage_server.store.records import Sizes
from collage_server.store.sealing.seal_plan import SealLimits
from collage_server.store.store import Store

__all__ = ["PostgresqlStore"]

_LOG: Final = logging.getLogger(__name__)
_DURABLE: Final = ("fsync", "synchronous_commit", "full_page_writes")
_BINARY: Final = 1
_NETWORK: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""A connection that nobody answers (a firewall forgot it, a machine is gone) is given up in half a minute, not in
a quarter of an hour, as systems do. The address may say otherwise."""
_STARTING: Final = "57P03"
"""cannot_connect_now: it starts, or recovers after a crash, and will be there by itself."""
_STARTING_SECONDS: Final = 600.0
_MIGRATION_LOCK: Final = 7_420_001
_PROJECT_LOCKS: Final = 7_420_002


class PostgresqlStore(Store):
    """A store at a SQLAlchemy URL. Rows are locked where two processes would otherwise decide on the same one.

    `unsafe` serves a cluster that may lose acknowledged reports.
    """

    def __init__(
        self,
        url: str,
        *,
        stale_after_seconds: float,
        limits: SealLimits | None = None,
        unsafe: bool = False,
        archive: ArchiveFiles | None = None,
        lock_timeout_seconds: float = 5.0,
    ) -> None:
        super().__init__(stale_after_seconds, limits or SealLimits(), archive)
        self._url = url
        self._unsafe = unsafe
        self._lock_timeout_seconds = lock_timeout_seconds
        self._claimed: Connection | None = None

    def migrate(self) -> None:
        """Bring the schema up to date, one process at a time; a lock that cannot be taken is an error, without
        waiting.

        Raises:
            StoreUnusable: the schema is newer than this server, or some table stays locked by others.
        """
        engine = self._connect()
        try:
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
                connection.execute(text(f"SET LOCAL lock_timeout = {int(1000 * self._lock_timeout_seconds)}"))
                migrate(connection)
        except OperationalError as error:
            raise StoreUnusable(f"the schema cannot be changed now: {error.orig}; try again") from error
        finally:
            engine.dispose()

    def _connect(self) -> Engine:
        try:
            url = make_url(self._url.replace("postgresql://", "postgresql+psycopg://", 1))
            given = {name: value for name, value in _NETWORK.items() if name not in url.query}
            engine = create_engine(url, **POOL, connect_args={**given, "client_encoding": "utf8"})
            event.listen(engine, "before_cursor_execute", _ask_for_binary)
            event.listen(engine, "handle_error", _give_up_what_only_reads)
        except ValueError:
            # Its own words would repeat what was taken for the port: of a password with an @ or a colon, a part.
            raise StoreUnusable(
                "the database URL cannot be used: its port is no number; write : and @ of a password as %3A and %40"
            ) from None
        except (ArgumentError, ModuleNotFoundError) as error:
            raise StoreUnusable(f"the database URL cannot be used: {error}") from error
        try:
            with _connect_when_it_is_up(engine) as connection:
                self._check_durability(connection)
        except OperationalError as error:
            engine.dispose()
            raise StoreUnusable(f"PostgreSQL does not answer: {error.orig}") from error
        except ProgrammingError as error:
            engine.dispose()
            raise StoreUnusable(f"the database URL cannot be used: {error.orig}") from error
        except StoreUnusable:
            engine.dispose()
            raise
        return engine

    def _check_durability(self, connection: Connection) -> None:
        """An answer promises durability; a cluster that does not keep that promise is refused."""
        off = [f"{name} = off" for name in _DURABLE if connection.execute(text(f"SHOW {name}")).scalar() == "off"]
        if off and not self._unsafe:
            raise StoreUnusable(
                f"PostgreSQL runs with {' and '.join(off)}: it may lose what this server has acknowledged; "
                "switch it on, or set COLLAGE_SERVER_UNSAFE_DATABASE=1 to accept that"
            )

    def _prepare_schema(self) -> None:
        with self.engine.connect() as connection:
            current = current_revision(connection)
        if current == head_revision():
            return
        if current is not None:
            check_revision(current)
        raise StoreUnusable(
            f"the database has schema revision {current}, this server needs {head_revision()}; "
            "run `collage-monitor setup database` with the same --database first"
        )

    def time(self, connection: Connection, now: float) -> float:
        """The database's own: servers stand on machines whose clocks may differ by days."""
        return float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())

    def own_time(self) -> float | None:
        """That of `time`."""
        with self.reading() as connection:
            return self.time(connection, 0.0)

    def place(self, connection: Connection) -> str:
        """The cluster, which its standbys share, and the database in it."""
        found = text(
            "SELECT (SELECT system_identifier FROM pg_control_system()), oid FROM pg_database "
            "WHERE datname = current_database()"
        )
        cluster, number = connection.execute(found).one()
        return f"{cluster}/{number}"

    @contextmanager
    def _begin_reading(self) -> Iterator[Connection]:
        with self.engine.connect() as plain:
            connection = plain.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            with connection.begin():
                yield connection

    @contextmanager
    def _begin_writing(self) -> Iterator[Connection]:
        with self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _begin_appending(self) -> Iterator[Connection]:
        """In autocommit, since psycopg waits for the answers to its own BEGIN and COMMIT.

        Two round trips instead of four: ten reports are stored 1.3 times as fast where one takes a millisecond.
        """
        with self.engine.connect() as plain:
            connection = plain.execution_options(isolation_level="AUTOCOMMIT")
            with connection.begin():
                yield connection

    @contextmanager
    def _claim(self, run_id: str) -> Iterator[bool]:
        """The run's claim is a row lock: it ends with this process, however that ends, and with its connection."""
        table = schema.seal_claim
        with self._begin_writing() as connection:
            connection.execute(insert(table).values(run_id=run_id).on_conflict_do_nothing())
        with self._begin_writing() as connection:
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            mine = select(table.c.run_id).where(table.c.run_id == run_id).with_for_update(skip_locked=True)
            self._claimed = connection
            try:
                yield connection.execute(mine).first() is not None
            finally:
                self._claimed = None

    def _require_claim(self) -> None:
        if self._claimed is not None:
            self._claimed.execute(text("SELECT 1"))

    def sizes(self) -> Sizes:
        """How much space the database takes; its disk is the cluster's business."""
        with self.reading() as connection:
            used = connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
        return Sizes(used_bytes=int(used), free_bytes=None, archived_bytes=self.archived_bytes())

    def make_room(self) -> None:
        """Its disk is the cluster's business."""

    def keep_room(self) -> None:
        """Its disk is the cluster's business."""

    def checkpoint_log(self, *, read_only: bool = False) -> None:
        """PostgreSQL's checkpoints do this."""

    def release_space(self) -> bool:
        """Let reports use the space of sealed ones: else the journal grows until autovacuum comes round."""
        with self.engine.connect() as plain:
            connection = plain.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text(f"VACUUM (SKIP_LOCKED) {schema.report.name}"))
        return False

    def lock_project(self, connection: Connection, project: str) -> None:
        """Keep others from adding runs or tags to the project in this transaction."""
        lock = text("SELECT pg_advisory_xact_lock(:space, hashtext(:project))")
        connection.execute(lock, {"space": _PROJECT_LOCKS, "project": project})


def _connect_when_it_is_up(engine: Engine) -> Connection:
    """A connection; waits for a cluster that is starting or recovering. Other failures are raised at once."""
    backoff, waited = Backoff(0.5, 5.0), 0.0
    while True:
        try:
            return engine.connect()
        except OperationalError as error:
            if not _is_starting(error) or waited >= _STARTING_SECONDS:
                raise
            if not waited:
                _LOG.warning("PostgreSQL starts or recovers: this server waits for it (%s)", error.orig)
            pause = backoff.pause()
            waited += pause
            time.sleep(pause)


def _is_starting(error: OperationalError) -> bool:
    """Before a connection stands the driver knows the server's words, but not always their code."""
    return getattr(error.orig, "sqlstate", None) == _STARTING or "the database system is" in str(error.orig)


def _ask_for_binary(
    _connection: Connection, cursor: Any, _statement: str, _parameters: Any, context: Any, _many: bool
) -> None:
    """Fetch blobs in binary, not as hexadecimal text, for statements with the execution option `blobs`."""
    if context is not None and context.execution_options.get("blobs"):
        cursor.format = _BINARY


def _give_up_what_only_reads(context: ExceptionContext) -> None:
    """After a failover such a session would stay in the pool for good."""
    context.is_disconnect = context.is_disconnect or reads_only(context.original_exception)
