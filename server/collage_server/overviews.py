"""Keeps what is said of each run up to date, in the background: the table of runs then costs no evaluation."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

import numpy as np

from collage_monitor import __version__, wire
from collage_monitor.judgement import OF_LAYERS, WORDS_VERSION
from collage_monitor.statistics import statistics_for
from collage_server.background import BackgroundThread
from collage_server.errors import Gone, NotFound
from collage_server.queries.overview import OverviewPoints, begin_of_recent_past, most_losing, overview
from collage_server.store import DueRun, Points, RunRecord, Selection, Snapshot, Store

__all__ = ["MADE_BY", "OverviewKeeper", "evaluate", "keep_overview"]

MADE_BY: Final = f"{__version__}/{WORDS_VERSION}"
"""Stands beside each overview: one that was made by another release, or in other words, is made anew."""
_LOG: Final = logging.getLogger(__name__)
_A_ROUND: Final = 64
_REWORDED_A_ROUND: Final = 4
_SHARE_OF_TIME: Final = 0.1
"""The most of its time that the thread works while nobody waits: live runs come round the less often the more."""
_HISTORY_POINTS: Final = 128
_RECENT_POINTS: Final = 2000
_MOST_LAYERS: Final = 1024
"""Whose histories are looked through for a change: those that lose the most, of a model of more."""
_LOSSES: Final = ("loss", "validation_loss")


class OverviewKeeper(BackgroundThread):
    """Evaluates the runs of which something has come since they were last evaluated."""

    def __init__(
        self, store: Store, *, interval_seconds: float = 2.0, share_of_time: float = _SHARE_OF_TIME
    ) -> None:
        super().__init__("overviews", interval_seconds=interval_seconds)
        self._store = store
        self._share_of_time = share_of_time

    def do_due_work(self) -> None:
        """Go over the runs that are due; a failure in one does not stop the others.

        After an upgrade all are due in other words: a few a round, so that what reports does not wait for them.
        """
        reworded = 0
        for due in self._store.overviews.due(_A_ROUND, MADE_BY):
            reworded += due.is_reworded
            if self.stopping.is_set() or reworded > _REWORDED_A_ROUND:
                return
            began = time.thread_time()
            try:
                keep_overview(self._store, due)
            except (Gone, NotFound):
                continue
            except Exception:
                _LOG.exception(
                    "run %s cannot be evaluated; the next round tries again, the others go on", due.run_id
                )
            if not due.is_new:
                self.stopping.wait((time.thread_time() - began) / self._share_of_time)


def keep_overview(store: Store, due: DueRun) -> wire.Overview:
    """Evaluate a run and keep what was found.

    Raises:
        NotFound, Gone: there is no such run.
    """
    with store.points.snapshot() as now:
        record = now.records([due.run_id])[due.run_id]
        found = evaluate(now, record)
    store.overviews.put(due, record, found, MADE_BY)
    return found


def evaluate(now: Snapshot, record: RunRecord) -> wire.Overview:
    """The overview of a run as a snapshot has it."""
    run_id = record.run_id

    def read(keys: tuple[str, ...] | None, selection: Selection) -> Points:
        return now.points([run_id], keys, selection)[run_id]

    recent = read(("measured_steps", "intended_squared_sum"), Selection(points=_RECENT_POINTS))
    past = Selection(first_step=begin_of_recent_past(recent), points=1)
    layers = tuple(dict.fromkeys(key for metric in OF_LAYERS for key in statistics_for(metric, intervals=False)))
    edq = statistics_for("edq_ratio", intervals=False)
    model = read(None, past)
    states = tuple(key for key in model.totals if key.startswith("state_decrement_"))
    history = Selection(points=_HISTORY_POINTS)
    merged = read(layers, replace(past, by_layer=True))
    losing = most_losing(merged, _MOST_LAYERS)
    lost = [
        name for name in _LOSSES if name in record.scalars and not np.isfinite(float(record.scalars[name].value))
    ]
    return overview(
        record,
        OverviewPoints(
            model=model,
            layers=merged,
            history=read((*edq, *states), history),
            layer_history=read(edq, replace(history, by_layer=True, layers=losing)),
            logged_losses=now.scalars([run_id], lost, Selection())[run_id] if lost else {},
        ),
    )
