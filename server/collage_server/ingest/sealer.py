"""The sealer: in the background, turns journals into chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from collage_server.background import Background
from collage_server.errors import Gone, NotFound

__all__ = ["Sealable", "Sealer"]

_LOG: Final = logging.getLogger(__name__)


class Sealable(Protocol):
    """What the sealer needs of a store."""

    def journal_runs(self) -> list[str]:
        """Runs that have reports in the journal."""

    def seal(self, run_id: str, now: float) -> int:
        """Turn some of the run's journal into parts of chunks; how many, 0 when nothing was due."""


class Sealer(Background):
    """Looks at every journal once an interval."""

    def __init__(self, store: Sealable, *, clock: Callable[[], float], interval_seconds: float) -> None:
        super().__init__("sealer", interval_seconds=interval_seconds)
        self._store = store
        self._clock = clock

    def look(self) -> None:
        """Seal what is due of every run; one that cannot be sealed does not keep the others."""
        for run_id in self._store.journal_runs():
            try:
                while not self.stopping.is_set() and self._store.seal(run_id, self._clock()):
                    pass
            except (Gone, NotFound):
                continue
            except Exception:
                _LOG.exception("run %s cannot be sealed; its journal keeps everything, the others go on", run_id)
