"""A drill: does a restored copy answer as the server does, and what would a loss cost now?

`command/backup.py` restores the copy aside and calls it (`tests/server/life/test_backup.py`).
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from collage_server.errors import ServerError
from collage_server.export.file_formats import csv_bytes
from collage_server.export.step_batches import plan_export
from collage_server.store import RunQuery, RunRecord, Store

__all__ = ["Drill", "drill"]

_RUNS_AT_ONCE: Final = 200


@dataclass(frozen=True, kw_only=True)
class Drill:
    """What a drill found.

    `compared` runs were exported from both and compared by digest; `problems` say which differ, or which side
    cannot read them. `lost_reports` of `lost_in_runs` runs and of `lost_runs` whole runs came since the back-up.
    They are lost with the server, unless their senders still have them.
    """

    compared: int
    problems: tuple[str, ...]
    lost_reports: int
    lost_in_runs: int
    lost_runs: int


def drill(server: Store, copy: Store, runs: int) -> Drill:
    """Compare so many runs, chosen at random from those that have not changed since; count what the copy lacks."""
    copied = {record.run_id: record for record in _records(copy)}
    alike, lost_reports, lost_in_runs, lost_runs = [], 0, 0, 0
    for record in _records(server):
        known = copied.get(record.run_id)
        if known is None:
            lost_runs += 1
            lost_reports += record.reports
        elif known.reports < record.reports:
            lost_in_runs += 1
            lost_reports += record.reports - known.reports
        elif known.changed_at == record.changed_at:
            alike.append(record.run_id)
    chosen = sorted(random.sample(alike, min(runs, len(alike))))
    problems = [problem for run_id in chosen if (problem := _difference(server, copy, run_id)) is not None]
    return Drill(
        compared=len(chosen),
        problems=tuple(problems),
        lost_reports=lost_reports,
        lost_in_runs=lost_in_runs,
        lost_runs=lost_runs,
    )


def _records(store: Store) -> Iterator[RunRecord]:
    cursor, is_last = None, False
    while not is_last:
        page = store.runs.page(RunQuery(cursor=cursor, limit=_RUNS_AT_ONCE), time.time(), 0.0)
        yield from page.runs
        cursor, is_last = page.cursor, page.cursor is None


def _difference(server: Store, copy: Store, run_id: str) -> str | None:
    """What is wrong with the run on one of the sides, if anything."""
    digests = []
    for store, where in ((server, "the server"), (copy, "the copy")):
        try:
            digests.append(_digest(store, run_id))
        except ServerError as error:
            return f"{where} cannot read run {run_id}: {error.message}"
    return None if digests[0] == digests[1] else f"run {run_id} differs: the copy answers otherwise than the server"


def _digest(store: Store, run_id: str) -> str:
    """The digest of a run's numbers: of the model, its layers, each rank, and what was logged."""
    whole = hashlib.sha256()
    for part in csv_bytes(store, plan_export(store, run_id, layers=True, ranks=True)):
        whole.update(part)
    return whole.hexdigest()
