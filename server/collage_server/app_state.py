"""The state of an application, which its routes share: settings, store, writer, clock. `create_app` makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from collage_server.alerts import AlertRounds
from collage_server.answer_cache import AnswerCache
from collage_server.archiver import Archiver
from collage_server.auth.principals import TokenDirectory
from collage_server.auth.quotas import Quotas
from collage_server.background import Maintenance, Sealer
from collage_server.dependencies import Dependency
from collage_server.disk_guard import DiskGuard
from collage_server.ingest.report_checks import StreamRegistry
from collage_server.ingest.writer import IngestCounters, JournalBounds, Writer
from collage_server.memory_budget import MemoryBudget
from collage_server.settings import FixedLimits, Settings
from collage_server.store import Store
from collage_server.summariser import Summariser

if TYPE_CHECKING:
    from collage_server.auth.oidc import Provider

__all__ = ["AppState", "app_state_of"]


@dataclass(frozen=True, eq=False)
class AppState:
    """The objects that requests share. `decoding`: a lock, so that one large body is decoded at a time.

    `archiver` is None without an archive, `provider` if people sign in by token alone.
    """

    settings: Settings
    limits: FixedLimits
    store: Store
    bounds: JournalBounds
    writer: Writer
    sealer: Sealer
    archiver: Archiver | None
    maintenance: Maintenance
    summariser: Summariser
    guard: DiskGuard
    alert_rounds: AlertRounds
    registry: StreamRegistry
    counters: IngestCounters
    memory: MemoryBudget
    decoding: asyncio.Semaphore
    directory: TokenDirectory
    quotas: Quotas
    answers: AnswerCache
    clock: Callable[[], float]
    provider: Provider | None
    dependencies: list[Dependency]


def app_state_of(connection: HTTPConnection) -> AppState:
    """The state of the application that serves this request."""
    app_state = connection.app.state.collage
    if not isinstance(app_state, AppState):
        raise TypeError("the application was not made by create_app")
    return app_state
