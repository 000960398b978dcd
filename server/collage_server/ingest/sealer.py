"""The sealer: in the background, turns journals into chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Final, Protocol

from collage_server.errors import Gone, NotFound

__all__ = ["Sealable", "Sealer"]

_LOG: Final = logging.getLogger(__name__)


class Sealable(Protocol):
    """What the sealer needs of a store."""

    def journal_runs(self) -> list[str]:
        """Runs that have reports in the journal."""

    def seal(self, run_id: str, now: float) -> int:
        """Turn some of the run's journal into parts of chunks; how many, 0 when nothing was due."""


class Sealer:
    """A thread that looks at every journal once an interval. It may be stopped at any point without harm."""

    def __init__(self, store: Sealable, *, clock: Callable[[], float], interval_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._stopping = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._stopping.clear()
        self._thread = Thread(target=self._run, name="collage-sealer", daemon=True)
        self._thread.start()

    def stop(self, deadline_seconds: float) -> None:
        """End after the part that is being sealed, or leave it unfinished at the deadline."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(deadline_seconds)
            self._thread = None

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_seconds):
            try:
                self._look()
            except Exception:
                _LOG.exception("sealing failed; the journal keeps everything, the next look tries again")

    def _look(self) -> None:
        for run_id in self._store.journal_runs():
            try:
                while not self._stopping.is_set() and self._store.seal(run_id, self._clock()):
                    pass
            except (Gone, NotFound):
                continue
            except Exception:
                _LOG.exception("run %s cannot be sealed; its journal keeps everything, the others go on", run_id)
