"""The application: `create_app(settings)`. Importing this module opens, starts and configures nothing.

`command/serve.py` and tests make applications here. It joins the parts and their lives, start to stop; what each
does is its own module's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import __version__
from collage_monitor.alerts import enabled_alerts
from collage_server import exposition
from collage_server.alerts import AlertEvaluator, AlertRounds, Messenger, targets_of
from collage_server.alerts.condition_evaluation import Evaluation
from collage_server.answer_cache import AnswerCache
from collage_server.api import api_routes
from collage_server.api.routing import add_description_and_pages
from collage_server.app_state import AppState
from collage_server.archiver import Archiver
from collage_server.auth.bearer import AccessPolicy
from collage_server.auth.principals import TokenDirectory
from collage_server.auth.quotas import Quotas
from collage_server.background import BackgroundThread, Maintenance, Sealer
from collage_server.clock import DatabaseClock
from collage_server.disk_guard import DiskGuard
from collage_server.ingest.report_checks import StreamRegistry
from collage_server.ingest.writer import IngestCounters, JournalBounds, Writer
from collage_server.memory_budget import MemoryBudget, available_memory
from collage_server.settings import FIXED_LIMITS, FixedLimits, Settings, SettingsError
from collage_server.store import READERS, PostgresqlStore, SqliteStore, Store, archive_files
from collage_server.store.backup import newest_backup
from collage_server.summariser import Summariser
from collage_server.web.failures import answer_to
from collage_server.web.middleware import AccessControl, AnswerMemory, ReadOnlyGate, RequestIdentity

if TYPE_CHECKING:
    from collage_server.auth.oidc import Provider

__all__ = ["create_app", "make_store"]

_LEAST_MEMORY: Final = 512 * 2**20
_MOST_MEMORY: Final = 4 * 2**30
_BALLAST_BYTES: Final = 32 * 2**20
"""Held inside the reserve: a checkpoint of SQLite's 16 MiB log needs as much space again."""


def create_app(
    settings: Settings,
    *,
    store: Store | None = None,
    clock: Callable[[], float] | None = None,
    limits: FixedLimits = FIXED_LIMITS,
) -> FastAPI:
    """The server on `settings`. `store` replaces the database, `clock` (Unix seconds) the time, `limits` bounds.

    Without a `clock`, times are the database's.

    The store is opened and the writer started when the application starts, and both are closed when it stops:
    waiting reports are committed first.
    """
    store = store or make_store(settings, limits)
    app_state = _app_state(settings, store, clock or DatabaseClock(store), limits)
    app = FastAPI(
        title="Collage Monitor",
        version=__version__,
        description="What low precision does to an optimizer's updates.",
        lifespan=_lifespan,
        middleware=[
            Middleware(RequestIdentity),
            Middleware(AccessControl, access=AccessPolicy(settings, app_state.directory, app_state.store.access)),
            Middleware(ReadOnlyGate, guard=app_state.guard),
            Middleware(AnswerMemory, memory=app_state.memory),
        ],
        # Every other error goes through to `RequestIdentity`; for these two the framework has words of its own.
        exception_handlers={HTTPException: _failed, RequestValidationError: _failed},
        docs_url=None,
        redoc_url=None,
        # This server's own numbers are at /metrics; FastAPI would look for tracers at each request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.collage = app_state
    app.state.alert_threads = _alert_threads(app_state)
    # A flat list, because an included router is matched twice for each request.
    # A redirect would lack our error shape and trust the name in Host.
    app.router.redirect_slashes = False
    app.router.routes += [*api_routes(), *exposition.router.routes]
    add_description_and_pages(app, settings.dashboard_url)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    return answer_to(error, request.scope)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app_state: AppState = app.state.collage
    current_default_thread_limiter().total_tokens = READERS
    await asyncio.to_thread(app_state.store.open)
    await asyncio.to_thread(app_state.maintenance.set_clock)
    app_state.writer.start(asyncio.get_running_loop())
    app_state.sealer.start()
    if app_state.archiver is not None:
        app_state.archiver.start()
    for thread in app.state.alert_threads:
        thread.start()
    await asyncio.to_thread(app_state.maintenance.start)
    app_state.summariser.start()
    try:
        yield
    finally:
        ends = time.monotonic() + app_state.limits.shutdown_seconds / 2

        def left() -> float:
            return max(ends - time.monotonic(), 0.0)

        await app_state.writer.stop(left())
        await asyncio.to_thread(app_state.summariser.stop, left())
        await asyncio.to_thread(app_state.sealer.stop, left())
        if app_state.archiver is not None:
            await asyncio.to_thread(app_state.archiver.stop, left())
        await asyncio.to_thread(app_state.maintenance.stop, left())
        await app_state.directory.close(left())
        # Stop alerts last: a webhook that hangs must take no time from the others. They need only the store.
        for thread in app.state.alert_threads:
            await asyncio.to_thread(thread.stop, left())
        await asyncio.to_thread(app_state.store.close)


def _app_state(settings: Settings, store: Store, clock: Callable[[], float], limits: FixedLimits) -> AppState:
    counters = IngestCounters()
    guard = DiskGuard(store, budget_bytes=settings.disk_budget_bytes, reserve_bytes=settings.disk_reserve_bytes)
    memory = _memory(settings, limits)
    store.fit_into(memory)
    # A reader takes all waiting reports of a run into memory.
    bounds = JournalBounds(min(limits.journal_run_bytes, memory.working_bytes // 4), limits.journal_bytes)
    archiver = _archiver(settings, store, guard, clock, memory, limits)
    provider = _provider(settings, clock)
    return AppState(
        settings=settings,
        limits=limits,
        store=store,
        bounds=bounds,
        writer=Writer(store.journal, counters, clock=clock, admit=guard.admit),
        sealer=Sealer(
            lambda: store.journal.runs() if guard.may_seal else [],
            store.sealing.seal,
            store.journal.bytes_of,
            bounds,
            clock=clock,
            interval_seconds=limits.seal_interval_seconds,
            sealed=archiver.tell if archiver is not None else lambda _: None,
            memory=memory,
        ),
        archiver=archiver,
        maintenance=Maintenance(
            store,
            guard,
            clock=clock,
            days=settings.retention_days,
            event_days=settings.retention_event_days,
            audit_days=settings.retention_audit_days,
        ),
        summariser=Summariser(store, memory=memory, counters=counters),
        guard=guard,
        alert_rounds=AlertRounds(),
        registry=StreamRegistry(store.streams.stream_record),
        counters=counters,
        memory=memory,
        decoding=asyncio.Semaphore(),
        directory=TokenDirectory(store.access, settings.token, clock=clock),
        quotas=Quotas(settings.runs_per_project, limits, store.access),
        answers=AnswerCache(memory.cache_bytes // 2),
        clock=clock,
        provider=provider,
        dependencies=[some.dependency for some in (store, archiver, provider) if some is not None],
    )


def _archiver(
    settings: Settings,
    store: Store,
    guard: DiskGuard,
    clock: Callable[[], float],
    memory: MemoryBudget,
    limits: FixedLimits,
) -> Archiver | None:
    if store.archiving is None:
        return None
    return Archiver(
        store,
        store.archiving,
        guard,
        clock=clock,
        interval_seconds=limits.seal_interval_seconds,
        memory=memory,
        publish=_publisher(store) if settings.archive_publish else None,
    )


def _publisher(store: Store) -> Callable[[str], object]:
    try:
        from collage_server.publishing import publish
    except ImportError as error:
        raise SettingsError(
            "COLLAGE_SERVER_ARCHIVE_PUBLISH needs pip install 'collage-monitor-server[archive]'; else unset it"
        ) from error
    return partial(publish, store)


def _memory(settings: Settings, limits: FixedLimits) -> MemoryBudget:
    limit = settings.memory_bytes
    if limit is None:
        limit = min(max((available_memory() or 0) // 2, _LEAST_MEMORY), _MOST_MEMORY)
    return MemoryBudget(limit, limits.in_flight_bytes)


def _provider(settings: Settings, clock: Callable[[], float]) -> Provider | None:
    if settings.oidc_issuer is None:
        return None
    # Imported here, because a server without this sign-in needs none of its libraries.
    from collage_server.auth.oidc import Provider

    return Provider(settings, clock=clock)


def _alert_threads(app_state: AppState) -> list[BackgroundThread]:
    """Evaluation and messages, as far as the settings ask for them."""
    settings, store, clock = app_state.settings, app_state.store, app_state.clock
    if settings.alerts == "off":
        return []
    interval = settings.alert_interval_seconds
    alerts = enabled_alerts(None if settings.alerts == "default" else settings.alerts)
    series = Evaluation(alerts).series
    evaluator = AlertEvaluator(
        store,
        lambda: exposition.samples(app_state, series),
        alerts,
        clock=clock,
        interval_seconds=interval,
        rounds=app_state.alert_rounds,
        memory=app_state.memory,
    )
    targets = targets_of(settings)
    if not targets:
        return [evaluator]
    messenger = Messenger(store, targets, clock=clock, interval_seconds=interval)
    app_state.dependencies.extend(messenger.dependencies.values())
    return [evaluator, messenger]


def _backups(data: Path) -> list[Path]:
    """Folders with copies of archived files."""
    newest = newest_backup(data)
    return [] if newest is None else [Path(newest.archive)]


def make_store(settings: Settings, limits: FixedLimits = FIXED_LIMITS) -> Store:
    """The store that these settings name, not opened yet.

    Raises:
        StoreUnusable: the archive's address cannot be used.
    """
    address = settings.archive_address
    cache = settings.folder / "archive-cache"
    archive = None if address is None else archive_files(address, cache, limits.archive_cache_bytes)
    if archive is not None:
        archive.backups = partial(_backups, settings.folder)
    store: Store
    if settings.database is not None:
        store = PostgresqlStore(
            settings.database,
            stale_after_seconds=limits.stale_after_seconds,
            unsafe=settings.unsafe_database,
            archive=archive,
        )
    else:
        store = SqliteStore(
            settings.folder / "collage.sqlite",
            stale_after_seconds=limits.stale_after_seconds,
            unsafe=settings.unsafe_database,
            archive=archive,
            ballast_bytes=min(_BALLAST_BYTES, settings.disk_reserve_bytes // 4),
        )
    return store
