"""The store on an SQL database: one object for each thing that changes together, on the same transactions."""

from __future__ import annotations

from collage_server.store.access.tokens import SqlAccess
from collage_server.store.contract import SealLimits
from collage_server.store.engine.database import Database
from collage_server.store.journal.reports import SqlJournal
from collage_server.store.journal.streams import SqlStreams
from collage_server.store.reading.snapshot import SqlPoints
from collage_server.store.runs.events import SqlEvents
from collage_server.store.runs.runs import SqlRuns
from collage_server.store.sealing.retention import SqlRetention, SqlSealing

__all__ = ["SqlStore"]


class SqlStore(Database):
    """Implements `Store`; a backend is one of these, and adds its dialect."""

    def __init__(self, stale_after_seconds: float, limits: SealLimits) -> None:
        super().__init__()
        self.access = SqlAccess(self.reading, self.writing)
        self.events = SqlEvents(self)
        self.streams = SqlStreams(self)
        self.journal = SqlJournal(self)
        self.points = SqlPoints(self, stale_after_seconds)
        self.sealing = SqlSealing(self, self.journal, limits, stale_after_seconds)
        self.retention = SqlRetention(self, self.sealing.seal_late_reports)
        self.runs = SqlRuns(self, self.retention.begin_purge)
