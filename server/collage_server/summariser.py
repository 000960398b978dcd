"""Summarises runs in the background: the newest measured step a second after its report, the overview when it can.

`/metrics`, the alerts and the table of runs then only look up `store/runs/run_summary.py`. How late its rows may be
is stated in `docs/architecture.md`. `queries/overview.py` holds the arithmetic of an overview; that it says what
a training says of the same points is tested in `tests/diagnosis/test_same_words.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Final

import numpy as np
from cachetools import TTLCache, cached

from collage_monitor import __version__, wire
from collage_monitor.diagnosis import OF_LAYERS, WORDS_VERSION
from collage_monitor.statistics import finish_all, statistics_for
from collage_server.background import BackgroundThread
from collage_server.errors import Busy, Damaged, Gone, NeedsTooMuch, NotFound
from collage_server.ingest.writer import IngestCounters
from collage_server.memory_budget import MemoryBudget, released_afterwards
from collage_server.queries.layer_answers import worst_layers
from collage_server.queries.overview import (
    OverviewPoints,
    begin_of_recent_past,
    edq_changes,
    find_silent_ranks,
    intended_share,
    most_losing,
    overview,
)
from collage_server.store import (
    KeptPoint,
    NewestPoint,
    Points,
    RunProgress,
    RunRecord,
    Selection,
    Snapshot,
    Store,
)

__all__ = ["MADE_BY", "Summariser", "evaluate", "evaluate_what_fits", "keep_overview", "newest_points"]

MADE_BY: Final = f"{__version__}/{WORDS_VERSION}"
"""Stands beside each overview: one that was made by another release, or in other words, is made again."""
_LOG: Final = logging.getLogger(__name__)
_POINTS_A_ROUND: Final = 10_000
_AT_ONCE: Final = 64
"""Of so many runs totals are in memory at a time."""
_POINTS_SHARE_OF_TIME: Final = 0.25
"""The most of its time for newest steps: with many live runs they are older than a second."""
_WORST: Final = "edq_ratio"
_WORST_LAYERS: Final = 3
_OVERVIEW_SECONDS: Final = 2.0
_OVERVIEWS_A_ROUND: Final = 64
_REWORDED_A_ROUND: Final = 4
_SHARE_OF_TIME: Final = 0.1
"""The most of its time that it evaluates while nobody waits: live runs come round the less often the more."""
_HISTORY_POINTS: Final = 128
_PRESENT_POINTS: Final = 64
"""Of the recent past: the newest of them are "now"."""
_RECENT_POINTS: Final = 2000
_MOST_CUTS: Final = 5
"""Each takes the newest quarter of what did not fit."""
_MOST_LAYERS: Final = 1024
"""Whose histories are looked through for a change: those that lose the most, of a model of more."""
_LOSSES: Final = ("loss", "validation_loss")


def newest_points(
    now: Snapshot, records: Mapping[str, RunRecord], *, layers: bool = False
) -> dict[str, NewestPoint | None]:
    """The newest measured step of each of these runs, None where nothing is measured.

    layers: the worst layers are asked for, too; without, they may be left out.
    """
    kept = now.kept_points(list(records))
    found, unknown = {}, []
    for run_id, record in records.items():
        row, progress = kept.get(run_id), RunProgress(record.updated_at, record.reports)
        if row is not None and row.progress == progress and (row.point is None or row.point.made_by == __version__):
            found[run_id] = row.point
        else:
            unknown.append(run_id)
    for some in _batches(unknown):
        found |= _newest_points(now, some, layers=layers)
    return found


def _newest_points(now: Snapshot, run_ids: Sequence[str], *, layers: bool) -> dict[str, NewestPoint | None]:
    """As `newest_points`, computed from the stored points.

    Raises:
        NotFound, Gone: one of the runs is not there.
    """
    found: dict[str, NewestPoint | None] = {}
    points = now.latest_of(run_ids)
    steps = {run_id: point.step for run_id, point in points.items() if point is not None and layers}
    by_layer = {}
    if steps:
        statistics = statistics_for(_WORST, intervals=False)
        by_layer = now.points(list(steps), statistics, Selection(by_layer=True, at=steps))
    for run_id, point in points.items():
        if point is None:
            found[run_id] = None
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            metrics = {key: wire.defined(float(value)) for key, value in finish_all(point.model).items()}
        worst = worst_layers(_WORST, by_layer[run_id], _WORST_LAYERS) if layers else []
        found[run_id] = NewestPoint(
            step=point.step, time=point.time, model=metrics, worst=worst, made_by=__version__
        )
    return found


def _batches(run_ids: Iterable[str]) -> Iterable[list[str]]:
    ids = list(run_ids)
    return (ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE))


class Summariser(BackgroundThread):
    """Every `interval_seconds` writes the newest steps of runs with new reports; evaluates runs meanwhile.

    share_of_time: the most of its time that it evaluates runs again.
    """

    def __init__(
        self,
        store: Store,
        *,
        interval_seconds: float = 1.0,
        share_of_time: float = _SHARE_OF_TIME,
        memory: MemoryBudget | None = None,
        counters: IngestCounters | None = None,
    ) -> None:
        super().__init__("summaries", interval_seconds=interval_seconds, memory=memory)
        self._store = store
        self._counters = counters
        self._share_of_time = share_of_time
        self._unreadable: set[str] = set()
        self._points_due = self._overviews_due = time.monotonic()

    def do_due_work(self) -> None:
        """Write the newest steps, and the overviews if they are due."""
        self.keep_points()
        if time.monotonic() >= self._overviews_due:
            self.keep_overviews()
            self._overviews_due = time.monotonic() + _OVERVIEW_SECONDS

    def keep_points(self) -> None:
        """Process the due runs once; one that cannot be read does not affect the others."""
        due, first = self._store.summaries.due_points(_POINTS_A_ROUND), time.monotonic()
        for some in _batches(due):
            began = time.thread_time()
            self._keep({run_id: due[run_id] for run_id in some})
            if len(due) > _AT_ONCE:
                self.stopping.wait((time.thread_time() - began) / _POINTS_SHARE_OF_TIME)
            if self.stopping.is_set():
                return
        now = time.monotonic()
        self._points_due = now + max(now - first, self._interval_seconds)

    def _keep(self, due: Mapping[str, RunProgress]) -> None:
        try:
            with self._store.points.snapshot() as now:
                points = self._points(now, list(due))
        except Exception as error:
            if isinstance(error, Busy) and not isinstance(error, Damaged):
                raise  # The database, not a run.
            if len(due) > 1:
                for run_id, progress in due.items():
                    self._keep({run_id: progress})
            elif not isinstance(error, Gone | NotFound):
                self._leave_out(next(iter(due)), error)
            return
        self._unreadable -= points.keys()
        self._store.summaries.put_points(
            {run_id: KeptPoint(due[run_id], point) for run_id, point in points.items()}
        )

    def _points(self, now: Snapshot, run_ids: list[str]) -> dict[str, NewestPoint | None]:
        """The newest point of each run; one too large for the memory is read alone, without its worst layers."""
        try:
            with released_afterwards():
                return _newest_points(now, run_ids, layers=True)
        except NeedsTooMuch:
            if len(run_ids) > 1:
                raise
        if self._counters is not None:
            self._counters.cut("newest")
        return _newest_points(now, run_ids, layers=False)

    def _leave_out(self, run_id: str, error: Exception) -> None:
        if run_id not in self._unreadable:
            self._unreadable.add(run_id)
            told = f"run {run_id} cannot be read: /metrics and alerts go on without it"
            if isinstance(error, Damaged):
                _LOG.error("%s: %s", told, error.message)
            else:
                _LOG.error("%s", told, exc_info=error)
            self._store.summaries.mark_unreadable(run_id)

    def keep_overviews(self) -> None:
        """Evaluate the runs that are due; a failure in one does not stop the others.

        After an upgrade all are due in other words: a few per round, so that reporting runs do not wait for them.
        """
        reworded = 0
        for due in self._store.summaries.due(_OVERVIEWS_A_ROUND, MADE_BY):
            reworded += due.is_reworded
            # Runs that only need new wording come last, so no run with new reports is left out.
            if self.stopping.is_set() or reworded > _REWORDED_A_ROUND:
                return
            began = time.thread_time()
            try:
                if due.is_reworded:
                    self._keep({due.run_id: due.progress})
                keep_overview(self._store, due.run_id, self._counters)
            except (Gone, NotFound):
                continue
            except Exception as error:
                self.log_failure(
                    error, f"run {due.run_id} cannot be evaluated; the next round tries again, the others go on"
                )
            self._rest(0.0 if due.is_new else (time.thread_time() - began) / self._share_of_time)

    def _rest(self, seconds: float) -> None:
        """Evaluate nothing for so long; newest steps are written meanwhile."""
        end = time.monotonic() + seconds
        while not self.stopping.is_set():
            if time.monotonic() >= self._points_due:
                self.keep_points()
            left = end - time.monotonic()
            if left <= 0:
                return
            self.stopping.wait(min(left, self._interval_seconds))


def keep_overview(store: Store, run_id: str, counters: IngestCounters | None = None) -> wire.Overview:
    """Evaluate a run and store the result; `counters` record if it was cut.

    Raises:
        NotFound, Gone: there is no such run.
    """
    with store.points.snapshot() as now:
        record = now.records([run_id], before_points=True)[run_id]
        found, first_step = evaluate_what_fits(now, record)
    if first_step is not None:
        _warn_of_a_cut(run_id, first_step)
        if counters is not None:
            counters.cut("overview")
    store.summaries.put(record, found, MADE_BY)
    return found


@cached(TTLCache(1_000, 3600.0), key=lambda run_id, _: run_id, lock=Lock())
def _warn_of_a_cut(run_id: str, first_step: int) -> None:
    """Log it, at most once an hour a run, which is all that the cache is for: each report brings an evaluation."""
    _LOG.warning("run %s is judged from step %d on: more does not fit into --memory", run_id, first_step)


def evaluate_what_fits(
    now: Snapshot, record: RunRecord, *, every_number: bool = False
) -> tuple[wire.Overview, int | None]:
    """The overview of the newest part of the run that fits into memory; and its first step, None: all.

    Raises:
        NeedsTooMuch: not even its last steps fit.
    """
    first, last = record.first_step or 0, record.last_step or 0
    for part in range(_MOST_CUTS + 1):
        begin = None if part == 0 else last - (last - first) // 4**part
        try:
            with released_afterwards():
                return evaluate(now, record, begin, every_number=every_number), begin
        except NeedsTooMuch:
            if part == _MOST_CUTS:
                raise
    raise AssertionError("the last part returns or raises")


def evaluate(
    now: Snapshot, record: RunRecord, first_step: int | None = None, *, every_number: bool = False
) -> wire.Overview:
    """The overview of a run as a snapshot has it; of its steps from `first_step` on. every_number: with all metrics
    of the model."""
    run_id = record.run_id

    def read(keys: tuple[str, ...] | None, selection: Selection) -> Points:
        return now.points([run_id], keys, selection)[run_id]

    recent = read(
        ("measured_steps", "intended_squared_sum", "elements"),
        Selection(first_step=first_step, points=_RECENT_POINTS),
    )
    past = Selection(first_step=begin_of_recent_past(recent, record) or first_step, points=_PRESENT_POINTS)
    layers = tuple(dict.fromkeys(key for metric in OF_LAYERS for key in statistics_for(metric, intervals=False)))
    edq, lost = (statistics_for(name, intervals=False) for name in ("edq_ratio", "lost_update_ratio"))
    model = read(None, past)
    states = tuple(key for key in model.totals if key.startswith(("state_decrement_", "state_increment_")))
    history = Selection(first_step=first_step, points=_HISTORY_POINTS)
    merged = read(layers, replace(past, points=1, by_layer=True))
    losing = most_losing(merged, _MOST_LAYERS)
    not_finite = [
        name for name in _LOSSES if name in record.scalars and not np.isfinite(float(record.scalars[name].value))
    ]
    tracked = tuple(dict.fromkeys((*edq, *lost, *states)))
    of_model = read(tracked, history)
    by_layer = read(edq, replace(history, by_layer=True, layers=losing))

    def between(first: int, last: int) -> Points:
        return read(tracked, replace(history, first_step=first, last_step=last))

    return overview(
        record,
        OverviewPoints(
            model=model,
            layers=merged,
            history=of_model,
            changes=edq_changes(of_model, by_layer, between),
            logged_losses=now.scalars([run_id], not_finite, Selection())[run_id] if not_finite else {},
            intended_share=intended_share(recent),
            silent=find_silent_ranks(recent, record, lambda: now.layers(run_id)),
            between=between,
            of_layer=lambda layer: read((*edq, *lost), replace(history, by_layer=True, layers=(layer,))),
        ),
        every_number=every_number,
    )
