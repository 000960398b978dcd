"""The sealer: in the background, turns journals into chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from collage_server.background import Background
from collage_server.errors import Gone, NotFound

__all__ = ["Sealer"]

_LOG: Final = logging.getLogger(__name__)


class Sealer(Background):
    """Once an interval `seal`s what is due of every run that is `waiting`."""

    def __init__(
        self,
        waiting: Callable[[], list[str]],
        seal: Callable[[str, float], int],
        *,
        clock: Callable[[], float],
        interval_seconds: float,
    ) -> None:
        super().__init__("sealer", interval_seconds=interval_seconds)
        self._waiting = waiting
        self._seal = seal
        self._clock = clock

    def look(self) -> None:
        """Seal what is due of every run; one that cannot be sealed does not keep the others."""
        for run_id in self._waiting():
            try:
                while not self.stopping.is_set() and self._seal(run_id, self._clock()):
                    pass
            except (Gone, NotFound):
                continue
            except Exception:
                _LOG.exception("run %s cannot be sealed; its journal keeps everything, the others go on", run_id)
