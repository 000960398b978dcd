"""The store on an SQL database: one object for each group of tables that change together.

`SqliteStore` and `PostgresqlStore` derive from it; routes reach each part by its name (`store.runs`,
`store.points`, …). The contract suite of `tests/server/store/contract.py` holds both to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from collage_server.errors import Busy, StoreUnusable
from collage_server.memory_budget import MemoryBudget
from collage_server.store.access.access_store import AccessStore
from collage_server.store.archive.archive_reader import ArchiveReader
from collage_server.store.archive.file_storage import ArchiveFiles
from collage_server.store.archive.finished import FinishedRuns
from collage_server.store.archive.segments import archived_bytes
from collage_server.store.database_check import DatabaseCheck
from collage_server.store.engine.database import ARCHIVE, Database
from collage_server.store.journal.report_journal import ReportJournal
from collage_server.store.journal.stream_store import StreamStore
from collage_server.store.reading.snapshot import PointStore
from collage_server.store.runs.events import EventStore
from collage_server.store.runs.incidents import IncidentStore
from collage_server.store.runs.run_store import RunStore
from collage_server.store.runs.run_summary import SummaryStore
from collage_server.store.runs.run_table import TableStore
from collage_server.store.sealing.archiving import Archiving
from collage_server.store.sealing.retention import Expiry, Retention, Sealing
from collage_server.store.sealing.seal_plan import SealLimits
from collage_server.store.sealing.slice_deletion import SliceDeletion

__all__ = ["Store"]

_COARSE_BYTES_A_NUMBER: Final = 320
"""Memory for one total while a chunk's coarse levels are made: 17 points, and their extremes."""
_ARCHIVED_SECONDS: Final = 60.0


class Store(Database):
    """Keeps runs and reports in one object for each group of tables; a backend adds its dialect.

    The methods of these objects may be called from any thread. Unknown ids raise NotFound, deleted runs Gone,
    contradictions Conflict. Times are Unix seconds.
    """

    def __init__(self, stale_after_seconds: float, limits: SealLimits, files: ArchiveFiles | None = None) -> None:
        super().__init__()
        archive, deletion = ArchiveReader(files), SliceDeletion(self)
        self._reader = archive
        self.access = AccessStore(self.reading, self.writing)
        self.events = EventStore(self)
        self.incidents = IncidentStore(self)
        self.expiry = Expiry(self)
        self.streams = StreamStore(self)
        self.journal = ReportJournal(self)
        self.points = PointStore(self, archive, stale_after_seconds)
        self.sealing = Sealing(self, self.journal, archive, limits, stale_after_seconds)
        self.retention = Retention(self, self.sealing.seal_late_reports, deletion)
        self.archiving = None if files is None else Archiving(self, files, deletion)
        self.finished = FinishedRuns(self)
        self.runs = RunStore(self, self.retention.begin_purge)
        self.summaries = SummaryStore(self)
        self.table = TableStore(self)
        self._archived_bytes, self._archived_due = 0, time.monotonic()

    def open(self, *, only_reads: bool = False) -> None:
        """Open the database; refuse an archive of another server, but not one that is unreachable now.

        only_reads: also take an archive that belongs to another database, as a copy's does.
        """
        super().open()
        self.engine.update_execution_options(**{ARCHIVE: self._reader})
        if self.archiving is not None and not only_reads:
            try:
                with suppress(Busy):
                    self.archiving.require_own()
            except StoreUnusable:
                self.close()
                raise

    def check_database(self, goes_on: Callable[[], bool] = lambda: True) -> DatabaseCheck | None:
        """Check the whole database and heal what is damaged; None where it checks itself.

        goes_on: is asked after every few rows, and ends the check with False.
        """
        return None

    def archived_bytes(self) -> int:
        """The size of all archived files, at most a minute old: adding up a million files takes a while."""
        if time.monotonic() >= self._archived_due:
            with self.reading() as connection:
                self._archived_bytes = archived_bytes(connection)
            self._archived_due = time.monotonic() + _ARCHIVED_SECONDS
        return self._archived_bytes

    def fit_into(self, memory: MemoryBudget) -> None:
        """Keep caches, and how much is sealed at a time, within a memory budget."""
        self.points.limit_cache(memory.cache_bytes // 2)
        self.streams.most_numbers = memory.working_bytes // (2 * _COARSE_BYTES_A_NUMBER)
        limits = self.sealing.limits
        self.sealing.limits = replace(limits, bytes=min(limits.bytes, memory.working_bytes // 16))
