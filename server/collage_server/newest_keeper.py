"""Keeps the newest measured step of each run, in the background: /metrics and alerts then only look it up.

Rows are `store/runs/newest_points.py`'s. How late they may be is stated in `docs/reference/curves.md`
(`tests/server/test_exposition.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from collage_monitor import __version__, wire
from collage_monitor.statistics import finish_all, statistics_for
from collage_server.background import BackgroundThread
from collage_server.errors import Busy, Gone, NeedsTooMuch, NotFound
from collage_server.ingest.writer import IngestCounters
from collage_server.memory_budget import MemoryBudget, released_afterwards
from collage_server.queries.layer_answers import worst_layers
from collage_server.store import KeptNewest, NewestPoint, RunProgress, RunRecord, Selection, Snapshot, Store

__all__ = ["NewestKeeper", "newest_points"]

_LOG: Final = logging.getLogger(__name__)
_A_ROUND: Final = 10_000
_AT_ONCE: Final = 64
"""Of so many runs totals are in memory at a time."""
_SHARE_OF_TIME: Final = 0.25
"""The most of its time that the thread works: with many live runs, rows are older than `interval_seconds`."""
_WORST: Final = "edq_ratio"
_WORST_LAYERS: Final = 3


def newest_points(
    now: Snapshot, records: Mapping[str, RunRecord], *, layers: bool = False
) -> dict[str, NewestPoint | None]:
    """The newest measured step of each of these runs; None without measurements.

    layers: include the worst layers; otherwise they may be missing.
    """
    kept = now.newest_kept(list(records))
    found, unknown = {}, []
    for run_id, record in records.items():
        row, progress = kept.get(run_id), RunProgress(record.updated_at, record.reports)
        if row is not None and (row.progress, row.made_by) == (progress, __version__):
            found[run_id] = row.point
        else:
            unknown.append(run_id)
    return found | _evaluated(now, unknown, layers=layers)


def _evaluated(now: Snapshot, run_ids: Sequence[str], *, layers: bool) -> dict[str, NewestPoint | None]:
    """As `newest_points`, computed from the stored points.

    Raises:
        NotFound, Gone: one of the runs is not there.
    """
    found: dict[str, NewestPoint | None] = {}
    for some in _batches(run_ids):
        points = now.latest_of(some)
        steps = {run_id: point.step for run_id, point in points.items() if point is not None and layers}
        by_layer = {}
        if steps:
            by_layer = now.points(
                list(steps), statistics_for(_WORST, intervals=False), Selection(by_layer=True, at=steps)
            )
        for run_id, point in points.items():
            if point is None:
                found[run_id] = None
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                metrics = {key: wire.defined(float(value)) for key, value in finish_all(point.model).items()}
            worst = worst_layers(_WORST, by_layer[run_id], _WORST_LAYERS) if layers else []
            found[run_id] = NewestPoint(step=point.step, time=point.time, model=metrics, worst=worst)
    return found


def _batches(run_ids: Iterable[str]) -> Iterable[list[str]]:
    ids = list(run_ids)
    return (ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE))


class NewestKeeper(BackgroundThread):
    """Writes the row of each run that has new reports, every `interval_seconds`."""

    def __init__(
        self,
        store: Store,
        *,
        interval_seconds: float = 1.0,
        share_of_time: float = _SHARE_OF_TIME,
        memory: MemoryBudget | None = None,
        counters: IngestCounters | None = None,
    ) -> None:
        super().__init__("newest", interval_seconds=interval_seconds, memory=memory)
        self._store = store
        self._counters = counters
        self._share_of_time = share_of_time
        self._unreadable: set[str] = set()

    def do_due_work(self) -> None:
        """Process the due runs once; one that cannot be read does not affect the others."""
        due = self._store.newest.due(_A_ROUND, __version__)
        for some in _batches(due):
            began = time.thread_time()
            self._keep({run_id: due[run_id] for run_id in some})
            if len(due) > _AT_ONCE:
                self.stopping.wait((time.thread_time() - began) / self._share_of_time)
            if self.stopping.is_set():
                return

    def _keep(self, due: Mapping[str, RunProgress]) -> None:
        try:
            with self._store.points.snapshot() as now:
                points = self._points(now, list(due))
        except Busy:  # The database, not a run.
            raise
        except Exception as error:
            if len(due) > 1:
                for run_id, progress in due.items():
                    self._keep({run_id: progress})
            elif not isinstance(error, Gone | NotFound):
                self._leave_out(*due)
            return
        self._unreadable -= points.keys()
        rows = {run_id: KeptNewest(due[run_id], __version__, point) for run_id, point in points.items()}
        self._store.newest.put(rows)

    def _points(self, now: Snapshot, run_ids: list[str]) -> dict[str, NewestPoint | None]:
        """The newest point of each run; one too large for the memory is read alone, without its worst layers."""
        try:
            with released_afterwards():
                return _evaluated(now, run_ids, layers=True)
        except NeedsTooMuch:
            if len(run_ids) > 1:
                raise
        if self._counters is not None:
            self._counters.cut("newest")
        return _evaluated(now, run_ids, layers=False)

    def _leave_out(self, run_id: str) -> None:
        """Delete the row, so that the run is not shown with old numbers; log it once."""
        if run_id not in self._unreadable:
            self._unreadable.add(run_id)
            _LOG.exception("run %s cannot be read: /metrics and alerts go on without it", run_id)
            self._store.newest.put({run_id: None})
