"""Keeps each run's overview up to date in the background, so that the table of runs needs no evaluation."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from threading import Lock
from typing import Final

import numpy as np
from cachetools import TTLCache, cached

from collage_monitor import __version__, wire
from collage_monitor.judgement import OF_LAYERS, WORDS_VERSION
from collage_monitor.statistics import statistics_for
from collage_server.background import BackgroundThread
from collage_server.errors import Gone, NeedsTooMuch, NotFound
from collage_server.ingest.writer import IngestCounters
from collage_server.memory import MemoryBudget, released_afterwards
from collage_server.queries.overview import (
    OverviewPoints,
    begin_of_recent_past,
    edq_changes,
    find_silent_ranks,
    most_losing,
    overview,
)
from collage_server.store import DueRun, Points, RunRecord, Selection, Snapshot, Store

__all__ = ["MADE_BY", "OverviewKeeper", "evaluate", "evaluate_within", "keep_overview"]

MADE_BY: Final = f"{__version__}/{WORDS_VERSION}"
"""Stands beside each overview: one that was made by another release, or in other words, is made again."""
_LOG: Final = logging.getLogger(__name__)
_A_ROUND: Final = 64
_REWORDED_A_ROUND: Final = 4
_SHARE_OF_TIME: Final = 0.1
"""The most of its time that the thread works while nobody waits: live runs come round the less often the more."""
_HISTORY_POINTS: Final = 128
_RECENT_POINTS: Final = 2000
_MOST_CUTS: Final = 5
"""Each takes the newest quarter of what did not fit."""
_MOST_LAYERS: Final = 1024
"""Whose histories are looked through for a change: those that lose the most, of a model of more."""
_LOSSES: Final = ("loss", "validation_loss")


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
        found, first_step = evaluate_within(now, record)
    if first_step is not None:
        _warn_of_a_cut(due.run_id, first_step)
        if counters is not None:
            counters.cut("overview")
    store.overviews.put(due, record, found, MADE_BY)
    return found


@cached(TTLCache(1_000, 3600.0), key=lambda run_id, _: run_id, lock=Lock())
def _warn_of_a_cut(run_id: str, first_step: int) -> None:
    """Once an hour a run: it is evaluated after each of its reports."""
    _LOG.warning("run %s is judged from step %d on: more does not fit into --memory", run_id, first_step)


def evaluate_within(now: Snapshot, record: RunRecord) -> tuple[wire.Overview, int | None]:
    """The overview of the newest part of the run that fits into memory; and its first step, None: all.

    Raises:
        NeedsTooMuch: not even its last steps fit.
    """
    first, last = record.first_step or 0, record.last_step or 0
    for part in range(_MOST_CUTS + 1):
        begin = None if part == 0 else last - (last - first) // 4**part
        try:
            with released_afterwards():
                return evaluate(now, record, begin), begin
        except NeedsTooMuch:
            if part == _MOST_CUTS:
                raise
    raise AssertionError("the last part returns or raises")


def evaluate(now: Snapshot, record: RunRecord, first_step: int | None = None) -> wire.Overview:
    """The overview of a run as a snapshot has it; of its steps from `first_step` on."""
    run_id = record.run_id

    def read(keys: tuple[str, ...] | None, selection: Selection) -> Points:
        return now.points([run_id], keys, selection)[run_id]

    recent = read(
        ("measured_steps", "intended_squared_sum", "elements"),
        Selection(first_step=first_step, points=_RECENT_POINTS),
    )
    past = Selection(first_step=begin_of_recent_past(recent) or first_step, points=1)
    layers = tuple(dict.fromkeys(key for metric in OF_LAYERS for key in statistics_for(metric, intervals=False)))
    edq = statistics_for("edq_ratio", intervals=False)
    model = read(None, past)
    states = tuple(key for key in model.totals if key.startswith("state_decrement_"))
    history = Selection(first_step=first_step, points=_HISTORY_POINTS)
    merged = read(layers, replace(past, by_layer=True))
    losing = most_losing(merged, _MOST_LAYERS)
    lost = [
        name for name in _LOSSES if name in record.scalars and not np.isfinite(float(record.scalars[name].value))
    ]
    of_model = read((*edq, *states), history)
    by_layer = read(edq, replace(history, by_layer=True, layers=losing))

    def between(first: int, last: int) -> Points:
        return read(edq, replace(history, first_step=first, last_step=last))

    return overview(
        record,
        OverviewPoints(
            model=model,
            layers=merged,
            history=of_model,
            changes=edq_changes(of_model, by_layer, between),
            logged_losses=now.scalars([run_id], lost, Selection())[run_id] if lost else {},
            silent=find_silent_ranks(recent, record, lambda: now.layers(run_id)),
        ),
    )
