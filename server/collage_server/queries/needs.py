"""Which statistics a metric is made from, found by watching the finishing functions read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collage_monitor.statistics import INTERVAL_PAIRS, finish, interval

__all__ = ["statistics_for"]


class _Recording(dict[str, NDArray[np.float64]]):
    """Totals that claim to hold every statistic and note which are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, None] = {}

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> NDArray[np.float64]:
        self.read[key] = None
        return np.ones(1)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


@lru_cache(maxsize=1000)
def statistics_for(metric: str, *, intervals: bool = True) -> tuple[str, ...]:
    """Keys of the statistics that `finish(metric, …)` reads, and `interval` too unless told not to.

    Raises:
        CatalogueError: no such metric, or a wrong label.
    """
    totals = _Recording()
    with np.errstate(all="ignore"):
        finish(metric, totals)
        if intervals and metric in INTERVAL_PAIRS:
            interval(metric, totals)
    return tuple(totals.read)
