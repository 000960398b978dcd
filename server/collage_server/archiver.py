"""The archiver: a background thread that turns sealed chunks into archived files, and removes leftover files.

On request, it also publishes the projects whose runs have ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock
from typing import Final

from collage_server.background import BackgroundThread
from collage_server.dependencies import Dependency
from collage_server.disk_guard import DiskGuard
from collage_server.errors import Busy, Damaged, DatabaseAway, Gone, NotFound
from collage_server.memory_budget import MemoryBudget
from collage_server.store import Archiving, Store

__all__ = ["Archiver"]

_LOG: Final = logging.getLogger(__name__)
_ROUND_SECONDS: Final = 3600.0
"""Between looks at every run: some were sealed by a server that has stopped since, or by another one."""
_VERIFY_SECONDS: Final = 10.0
_FILES_AT_ONCE: Final = 4
"""Verified each time: a file has about a megabyte, so that nobody notices, and a million of them take a month."""
_VERIFIED_SECONDS: Final = 30 * 86_400.0
"""A file that was verified more recently is left alone."""
_PUBLISH_SECONDS: Final = 60.0
"""Between two publications: each looks through all finished runs of a project."""


class Archiver(BackgroundThread):
    """Archives the runs that were announced to it, and once an hour every run that has chunks; then it also sweeps.

    Files are read as a whole now and then, and healed from a back-up where they are damaged.

    While the archive takes no files, chunks stay in the database and are read there: nothing waits but this.

    `publish` is called with each project that has a newly ended and archived run, and once an hour with all
    projects.
    """

    def __init__(
        self,
        store: Store,
        archiving: Archiving,
        guard: DiskGuard,
        *,
        clock: Callable[[], float],
        interval_seconds: float,
        memory: MemoryBudget | None = None,
        publish: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__("archiver", interval_seconds=interval_seconds, memory=memory, owner="sealing")
        self._store = store
        self._archiving = archiving
        self._guard = guard
        self._clock = clock
        self._publish = publish
        self._unpublished: dict[str, None] = {}
        self._publish_due = time.monotonic()
        self._told: dict[str, None] = {}
        self._lock = Lock()
        self._round_due = time.monotonic()
        self.dependency = Dependency("the archive")
        self._verify_due = time.monotonic()
        self.damaged_files: int | None = None
        """How many archived files were missing or damaged when last verified; None before the first look."""

    @property
    def away_seconds(self) -> float:
        """For how long the archive has taken no files; 0 while it does."""
        return self.dependency.away_seconds

    def tell(self, run_id: str) -> None:
        """Announce that a part of this run was sealed."""
        with self._lock:
            self._told[run_id] = None

    def do_due_work(self) -> None:
        """Archive the due chunks; a run that fails does not stop the others, an archive that is away stops all.

        So does a database that is away, which says nothing of the archive.
        """
        if not self._guard.may_seal:
            return
        try:
            if time.monotonic() >= self._round_due:
                # Set before the search, so that a failure (the archive is away) does not repeat it at once.
                self._round_due = time.monotonic() + _ROUND_SECONDS
                for sealed in self._store.retention.sealed_runs():
                    self.tell(sealed)
                self._archiving.sweep(self._clock())
                if self._publish is not None:
                    self._unpublished |= dict.fromkeys(self._store.finished.projects())
            while (run_id := self._next()) is not None:
                self._archive(run_id)
            self._verify_files()
            self._publish_projects()
        except DatabaseAway:
            return
        except Busy as error:
            self.dependency.fails(f"nothing is archived, and chunks stay in the database: {error.message}")
            return
        self.dependency.works()

    def _next(self) -> str | None:
        """The run that waits for longest. An announcement from now on causes another look."""
        with self._lock:
            run_id = None if self.stopping.is_set() else next(iter(self._told), None)
            if run_id is not None:
                del self._told[run_id]
            return run_id

    def _archive(self, run_id: str) -> None:
        """Archive the due chunks of the run; if the archive is away, the run is announced again."""
        try:
            while not self.stopping.is_set() and self._archiving.archive(run_id):
                pass
            if self._publish is not None and (record := self._store.runs.get(run_id)).state != "running":
                self._unpublished[record.project] = None
        except (Gone, NotFound):
            pass
        except Damaged as error:
            _LOG.error("run %s cannot be archived, the others go on: %s", run_id, error.message)
        except Busy:
            self.tell(run_id)
            raise
        except Exception:
            _LOG.exception("run %s cannot be archived; its chunks stay in the database, the others go on", run_id)

    def _verify_files(self) -> None:
        """Read what somebody could not read, and a few of the files that were not verified for longest."""
        verification = self._archiving.verification
        due = verification.suspects()
        if time.monotonic() >= self._verify_due:
            due += verification.due(self._clock() - _VERIFIED_SECONDS, _FILES_AT_ONCE)
            self._verify_due = time.monotonic() + _VERIFY_SECONDS
        for row in due:
            if not self.stopping.is_set():
                verification.verify(row, self._clock())
        if due or self.damaged_files is None:
            self.damaged_files = len(verification.problems())

    def _publish_projects(self) -> None:
        """A project that cannot be published is tried again at the next round, the others go on."""
        if self._publish is None or not self._unpublished or time.monotonic() < self._publish_due:
            return
        self._publish_due = time.monotonic() + _PUBLISH_SECONDS
        for project in list(self._unpublished):
            if self.stopping.is_set():
                return
            try:
                self._publish(project)
                del self._unpublished[project]
            except Busy as error:
                _LOG.warning("project %s is not published now: %s", project, error.message)
            except Exception:
                _LOG.exception("project %s cannot be published; the others go on", project)
