"""Keeps each run's overview up to date in the background, so that the table of runs needs no evaluation.

`run_evaluation` makes an overview, `queries/overview.py` holds its arithmetic, `store/runs/overviews.py` stores it.
"""

from __future__ import annotations

import logging
import time
from threading import Lock
from typing import Final

from cachetools import TTLCache, cached

from collage_monitor import __version__, wire
from collage_monitor.judgement import WORDS_VERSION
from collage_server.background import BackgroundThread
from collage_server.errors import Gone, NotFound
from collage_server.ingest.writer import IngestCounters
from collage_server.memory_budget import MemoryBudget
from collage_server.run_evaluation import evaluate_what_fits
from collage_server.store import DueRun, Store

__all__ = ["MADE_BY", "OverviewKeeper", "keep_overview"]

MADE_BY: Final = f"{__version__}/{WORDS_VERSION}"
"""Stands beside each overview: one that was made by another release, or in other words, is made again."""
_LOG: Final = logging.getLogger(__name__)
_A_ROUND: Final = 64
_REWORDED_A_ROUND: Final = 4
_SHARE_OF_TIME: Final = 0.1
"""The most of its time that the thread works while nobody waits: live runs come round the less often the more."""


class OverviewKeeper(BackgroundThread):
    """Evaluates the runs with new reports since their last evaluation."""

    def __init__(
        self,
        store: Store,
        *,
        interval_seconds: float = 2.0,
        share_of_time: float = _SHARE_OF_TIME,
        memory: MemoryBudget | None = None,
        counters: IngestCounters | None = None,
    ) -> None:
        super().__init__("overviews", interval_seconds=interval_seconds, memory=memory)
        self._store = store
        self._counters = counters
        self._share_of_time = share_of_time

    def do_due_work(self) -> None:
        """Go over the runs that are due; a failure in one does not stop the others.

        After an upgrade all are due in other words: a few per round, so that reporting runs do not wait for them.
        """
        reworded = 0
        for due in self._store.overviews.due(_A_ROUND, MADE_BY):
            reworded += due.is_reworded
            # Those that are only to be reworded come last, so this leaves no run with new reports.
            if self.stopping.is_set() or reworded > _REWORDED_A_ROUND:
                return
            began = time.thread_time()
            try:
                keep_overview(self._store, due, self._counters)
            except (Gone, NotFound):
                continue
            except Exception as error:
                self.log_failure(
                    error, f"run {due.run_id} cannot be evaluated; the next round tries again, the others go on"
                )
            if not due.is_new:
                self.stopping.wait((time.thread_time() - began) / self._share_of_time)


def keep_overview(store: Store, due: DueRun, counters: IngestCounters | None = None) -> wire.Overview:
    """Evaluate a run and store the result; `counters` record if it was cut.

    Raises:
        NotFound, Gone: there is no such run.
    """
    with store.points.snapshot() as now:
        record = now.records([due.run_id])[due.run_id]
        found, first_step = evaluate_what_fits(now, record)
    if first_step is not None:
        _warn_of_a_cut(due.run_id, first_step)
        if counters is not None:
            counters.cut("overview")
    store.overviews.put(due, record, found, MADE_BY)
    return found


@cached(TTLCache(1_000, 3600.0), key=lambda run_id, _: run_id, lock=Lock())
def _warn_of_a_cut(run_id: str, first_step: int) -> None:
    """Log the cut, through the cache at most once an hour a run: each report brings an evaluation."""
    _LOG.warning("run %s is judged from step %d on: more does not fit into --memory", run_id, first_step)
