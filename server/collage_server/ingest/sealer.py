"""The sealer: in the background, turns journals into chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from collage_server.background import Background
from collage_server.errors import Gone, NotFound
from collage_server.store import JournalBounds

__all__ = ["Sealer"]

_LOG: Final = logging.getLogger(__name__)


class Sealer(Background):
    """Once an interval, and when the journal is half full, `seal`s what is due of every run that is `waiting`."""

    def __init__(
        self,
        waiting: Callable[[], list[str]],
        seal: Callable[..., int],
        bytes_of: Callable[[str], int],
        bounds: JournalBounds,
        *,
        clock: Callable[[], float],
        interval_seconds: float,
    ) -> None:
        super().__init__("sealer", interval_seconds=interval_seconds)
        self._waiting = waiting
        self._seal = seal
        self._bytes_of = bytes_of
        self._bounds = bounds
        self._clock = clock
        bounds.on_pressure = self.wake

    def look(self) -> None:
        """Seal what is due of every run; one that cannot be sealed does not keep the others."""
        waiting = self._waiting()
        for run_id in waiting:
            try:
                self._seal_run(run_id)
            except (Gone, NotFound):
                continue
            except Exception:
                _LOG.exception("run %s cannot be sealed; its journal keeps everything, the others go on", run_id)
        for run_id in {*waiting, *self._bounds.waiting()}:
            if self._bounds.uncertain(run_id):
                self._bounds.count(run_id, self._bytes_of(run_id))
        self._bounds.looked()

    def _seal_run(self, run_id: str) -> None:
        pressed = self._bounds.presses(run_id)
        while not self.stopping.is_set() and self._seal(run_id, self._clock(), pressed=pressed):
            pass
