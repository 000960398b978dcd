"""Replicas compared: ranks that hold the same elements of a tensor report checksums of the bits, which must agree.

This is done before the journal is sealed: every report is compared with those of its step that are still there.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, func, insert, select

from collage_server.store import schema
from collage_server.store.reading.report_merging import decode_layers, decode_model, layer_replicas
from collage_server.store.reading.run_view import RunView
from collage_server.store.reading.unsealed import read_reports, read_unsealed, visible_rows
from collage_server.store.records import FloatArray, IntArray, NewEvent, Selection
from collage_server.store.row_helpers import Ranges, add_numbers, contains, int_array, to_json
from collage_server.store.runs.events import MOST_LAYERS, add_events

__all__ = ["Mismatch", "ReplicaComparison", "count_mismatches", "keep_mismatches", "mismatches_by_run"]

_KEYS: Final = ("replica_checksum", "replica_checksum_elements")
_KEY: Final = ("stream_id", "seq", "step")
_MOST_ROWS: Final = 10_000
_MOST_REPLICAS: Final = 16
_KEPT_RUNS: Final = 1000


@dataclass(frozen=True)
class Mismatch:
    """A layer whose replicas differ at a step. `replicas`: those that differ from the majority (in a tie, from the
    lowest)."""

    attempt: int
    step: int
    layer: int
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class ComparedReports:
    """Reports already compared: their `seqs` by stream, at a time when the run had `stored` reports in all."""

    stored: int = -1
    seqs: Mapping[str, Ranges] = field(default_factory=dict)


class ReplicaComparison:
    """Finds replicas that differ, among reports not compared before; this process remembers which it compared."""

    def __init__(self) -> None:
        self._compared: LRUCache[str, ComparedReports] = LRUCache(_KEPT_RUNS)
        self._lock = Lock()

    def find(self, view: RunView) -> tuple[list[Mismatch], ComparedReports | None]:
        """Mismatches at the steps of unsealed reports that are new to this process, and what to remember."""
        if not view.replicated or not view.statistics(_KEYS):
            return [], None
        with self._lock:
            compared = self._compared.get(view.run_id, ComparedReports())
        stored = _stored(view)
        if stored == compared.stored:
            return [], None
        new_seqs, steps = _new_reports(view, compared)
        known = dict(compared.seqs)
        known.update({name: add_numbers(known.get(name, ()), seqs) for name, seqs in new_seqs.items()})
        found = (
            mismatch
            for attempt, rows in (_by_attempt(view, steps) if len(steps) else ())
            for mismatch in _compare_rows(view, attempt, rows)
        )
        # keep_mismatches stores no more than this in all, known ones included.
        return list(islice(found, _MOST_ROWS)), ComparedReports(stored, known)

    def remember(self, run_id: str, compared: ComparedReports) -> None:
        """Do not compare these reports again: their mismatches are stored."""
        with self._lock:
            self._compared[run_id] = compared


def _stored(view: RunView) -> int:
    table = schema.run_latest
    total = select(func.coalesce(func.sum(table.c.reports), 0)).where(table.c.run_id == view.run_id)
    return int(view.connection.execute(total).scalar_one())


def _new_reports(view: RunView, compared: ComparedReports) -> tuple[dict[str, array[int]], IntArray]:
    """The seqs of reports that were not compared yet, by stream, and their steps."""
    seqs: dict[str, array[int]] = defaultdict(lambda: array("q"))
    steps: array[int] = array("q")
    for row in read_reports(view.connection, [view.run_id], _KEY, "statistics", Selection()):
        if not contains(compared.seqs.get(row.stream_id, ()), row.seq):
            seqs[row.stream_id].append(row.seq)
            steps.append(row.step)
    return seqs, np.unique(np.frombuffer(steps, dtype=np.int64))


def _by_attempt(view: RunView, steps: IntArray) -> Iterator[tuple[int, list[Any]]]:
    """Rows with model vectors at these steps, one process per rank, without sealed reports."""
    selection = Selection(first_step=int(steps[0]), last_step=int(steps[-1]))
    unsealed = read_unsealed(view.connection, {view.run_id: view}, selection, layers=False)
    wanted = set(steps.tolist())
    for attempt, rows in sorted(unsealed[view.run_id].items()):
        yield attempt, visible_rows(view, [row for row in rows if row.step in wanted], {})


def _compare_rows(view: RunView, attempt: int, rows: Sequence[Any]) -> Iterator[Mismatch]:
    """Mismatches by layer. Model vectors come first: they are small, and where they agree no layer differs."""
    steps = sorted(_suspicious_steps(view, rows))
    if not steps:
        return
    chosen = {(row.stream_id, row.seq) for row in rows}
    between = Selection(first_step=steps[0], last_step=steps[-1])
    rows_by_step: dict[int, list[Any]] = {step: [] for step in steps}
    for row in read_unsealed(view.connection, {view.run_id: view}, between, layers=True)[view.run_id].get(
        attempt, ()
    ):
        if row.step in rows_by_step and (row.stream_id, row.seq) in chosen:
            rows_by_step[row.step].append(row)
    for step, members in rows_by_step.items():
        if members:
            yield from _compare_step(view, attempt, step, members)


def _suspicious_steps(view: RunView, rows: Sequence[Row[Any]]) -> Iterable[int]:
    if view.replicas_beside_shards:
        return {row.step for row in rows}
    checksums = decode_model(view.streams, rows, _KEYS).array
    replicas = [int(view.streams[row.stream_id].replicas[:1].sum()) for row in rows]
    sums: dict[int, dict[int, FloatArray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    for row, replica, values in zip(rows, replicas, checksums.T, strict=True):
        if not np.isnan(values).any():
            sums[row.step][replica] += values
    return [step for step, table in sums.items() if len({tuple(values) for values in table.values()}) > 1]


def _compare_step(view: RunView, attempt: int, step: int, rows: Sequence[Row[Any]]) -> Iterator[Mismatch]:
    positions = np.arange(len(view.layers), dtype=np.int64)
    numbers = np.stack([layer_replicas(view.streams[row.stream_id], positions) for row in rows])
    checksums = decode_layers(view.streams, rows, _KEYS, positions).array
    replicas, sums, shards = _by_replica(numbers, checksums)
    complete = (shards == _expected_shards(view, attempt, len(positions), replicas)) & (shards > 0)
    for layer in np.flatnonzero(_unequal(sums, complete)).tolist():
        held = complete[:, layer]
        _, which, counts = np.unique(sums[0, held, layer], return_inverse=True, return_counts=True)
        most = which[0] if counts[which[0]] == counts.max() else int(counts.argmax())
        apart = replicas[held][which != most]
        yield Mismatch(attempt, step, layer, tuple(apart[:_MOST_REPLICAS].tolist()))


def _by_replica(numbers: FloatArray, checksums: FloatArray) -> tuple[IntArray, FloatArray, IntArray]:
    """(replica numbers, their sums [2, replicas, layers], shards reported [replicas, layers])."""
    there = ~np.isnan(numbers) & ~np.isnan(checksums).any(0)
    replicas = np.unique(numbers[there]).astype(np.int64)
    rows, layers = np.nonzero(there)
    places = np.searchsorted(replicas, numbers[there])
    sums = np.zeros((2, len(replicas), numbers.shape[1]))
    shards = np.zeros(sums.shape[1:], dtype=np.int64)
    for total, values in zip(sums, checksums, strict=True):
        np.add.at(total, (places, layers), values[rows, layers])
    np.add.at(shards, (places, layers), 1)
    return replicas, sums, shards


def _expected_shards(view: RunView, attempt: int, count: int, replicas: IntArray) -> IntArray:
    """How many ranks of the attempt hold a part of each replica of each layer: int64 [replicas, count]."""
    table = schema.stream
    rows = view.connection.execute(select(table.c.stream_id, table.c.elements).where(table.c.run_id == view.run_id))
    elements = {row.stream_id: int_array(row.elements) for row in rows}
    expected = np.zeros((len(replicas), count), dtype=np.int64)
    seen: set[int] = set()
    for stream in view.streams.values():
        if stream.attempt != attempt or stream.rank in seen:
            continue
        seen.add(stream.rank)
        held = (elements[stream.stream_id] > 0) & np.isin(stream.replicas, replicas)
        expected[np.searchsorted(replicas, stream.replicas[held]), stream.layers[held]] += 1
    return expected


def _unequal(sums: FloatArray, complete: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Layers where complete replicas differ, bool [layers]; only replicas with equal samples are comparable."""
    first = complete.argmax(0)
    layers = np.arange(complete.shape[1])
    differs = complete & (sums[1] == sums[1][first, layers]) & (sums[0] != sums[0][first, layers])
    unequal: NDArray[np.bool_] = differs.any(0)
    return unequal


def keep_mismatches(connection: Connection, run_id: str, found: Sequence[Mismatch], now: float) -> None:
    """Store mismatches; add an event for each layer that differs for the first time in its attempt."""
    table = schema.replica_mismatch
    rows = connection.execute(
        select(table.c.attempt, table.c.step, table.c.layer).where(table.c.run_id == run_id)
    ).all()
    known = {tuple(row) for row in rows}
    fresh = [entry for entry in found if (entry.attempt, entry.step, entry.layer) not in known]
    fresh = fresh[: max(_MOST_ROWS - len(known), 0)]
    if not fresh:
        return
    values = [
        {
            "run_id": run_id,
            "attempt": entry.attempt,
            "step": entry.step,
            "layer": entry.layer,
            "replicas": to_json(entry.replicas),
        }
        for entry in fresh
    ]
    connection.execute(insert(table), values)
    announced = {(row.attempt, row.layer) for row in rows}
    first: dict[tuple[int, int], list[Mismatch]] = defaultdict(list)
    for entry in sorted(fresh, key=lambda entry: (entry.attempt, entry.step, entry.layer)):
        if (entry.attempt, entry.layer) not in announced:
            announced.add((entry.attempt, entry.layer))
            first[entry.attempt, entry.step].append(entry)
    names = _layer_names(connection, run_id)
    add_events(connection, run_id, [_event(entries, names) for entries in first.values()], now)


def _layer_names(connection: Connection, run_id: str) -> dict[int, str]:
    table = schema.layer
    rows = connection.execute(select(table.c.layer, table.c.name).where(table.c.run_id == run_id))
    return {row.layer: row.name for row in rows}


def _event(entries: Sequence[Mismatch], names: dict[int, str]) -> NewEvent:
    first = entries[0]
    replicas = sorted({replica for entry in entries for replica in entry.replicas})
    layers = [names[entry.layer] for entry in entries]
    shown = ", ".join(layers[:MOST_LAYERS])
    more = len(layers) - MOST_LAYERS
    text = (
        f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas[:MOST_LAYERS]))} of attempt "
        f"{first.attempt} held other weights than the rest after step {first.step} in {shown}"
    )
    return NewEvent(
        origin=f"replica_mismatch/{first.attempt}/{first.step}/{first.layer}",
        kind="replica_mismatch",
        text=text + (f" and {more} more" if more > 0 else ""),
        attempt=first.attempt,
        step=first.step,
        layers=layers,
    )


def count_mismatches(connection: Connection) -> int:
    """Layers and steps at which replicas differed, over all runs."""
    count: int = connection.execute(select(func.count()).select_from(schema.replica_mismatch)).scalar_one()
    return count


def mismatches_by_run(connection: Connection) -> dict[str, int]:
    """Layers and steps at which replicas of a run's newest measuring attempt differed; no runs without any."""
    table, attempt = schema.replica_mismatch, schema.measured_attempt
    newest = select(func.max(attempt.c.attempt)).where(attempt.c.run_id == table.c.run_id).scalar_subquery()
    rows = select(table.c.run_id, func.count()).where(table.c.attempt == newest).group_by(table.c.run_id)
    return {row.run_id: row[1] for row in connection.execute(rows)}
