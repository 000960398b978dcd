"""A run read a batch of steps at a time, each batch from a snapshot of its own, so that an export may take long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_server.memory_budget import hold, released_afterwards, reserve
from collage_server.store import Points, RunRecord, ScalarPoints, Selection, Snapshot, Store

__all__ = ["ExportPlan", "StepBatch", "plan_export", "read_batches", "read_ranks", "take_memory"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NUMBERS: Final = 2**20
"""Numbers of totals, and of logged values, that one batch holds at most, unless a single step has more."""
_READ_NUMBERS: Final = 2**19
"""Of totals by layer that are read at a time: reading takes as much again, twice."""
_POINTS: Final = 4096
_STEPS: Final = 4096
_OF_POINTS: Final = ("first_steps", "steps", "times", "ranks", "counts")
_LOGGED_BYTES: Final = 9
"""A value, and whether it was logged."""
_WORK_BYTES: Final = 100
"""That reading and writing a batch take at their peak for each total of it, as measured: CSV takes most."""
_LOGGED_WORK_BYTES: Final = 30
_SMALL_BYTES: Final = 2**23
_LAYER_BYTES: Final = 400
_POINT_BYTES: Final = 24


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """The contents of an export, fixed at its begin: steps, layers, statistics and scalars.

    `events` had happened to the run, the newest numbered `last_event`. `steps` holds every step that was measured
    or has a logged value. Later steps are left out; a late report for one of these is included if it comes before
    its batch is read. `ranks`: also export whole-model totals for each of these ranks.
    """

    run: RunRecord
    steps: IntArray
    layers: list[wire.Layer]
    statistics: list[str]
    scalars: Mapping[str, ScalarPoints]
    batch_points: int
    measured: IntArray
    events: int
    last_event: int
    ranks: list[int]

    @property
    def rows(self) -> int:
        """Rows of the whole model and of layers; rows of single ranks do not count."""
        return len(self.steps) + len(self.measured) * len(self.layers)

    @property
    def steps_at_once(self) -> int:
        """The most steps of a batch, as far as their logged values allow."""
        return max(min(_STEPS, _NUMBERS // max(len(self.scalars), 1)), 1)

    @property
    def held_bytes(self) -> int:
        """The plan's own memory."""
        logged = sum(len(entry.steps) for entry in self.scalars.values())
        return _POINT_BYTES * (len(self.steps) + logged) + _LAYER_BYTES * len(self.layers)

    @property
    def batch_bytes(self) -> int:
        """About the additional memory for reading and writing a batch."""
        points = min(self.batch_points, len(self.measured))
        numbers = points * (1 + len(self.layers)) * max(len(self.statistics), 1)
        logged = min(self.steps_at_once, len(self.steps)) * len(self.scalars)
        return _WORK_BYTES * numbers + _LOGGED_WORK_BYTES * logged + _SMALL_BYTES


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The consecutive steps of `selection`. `points.steps` is a subset of `steps`.

    `layers` holds totals [points, layers]; `scalars`: name → (values [steps], which of them were logged).
    """

    selection: Selection

    steps: IntArray
    times: FloatArray
    points: Points
    layers: Mapping[str, FloatArray]
    scalars: Mapping[str, tuple[FloatArray, NDArray[np.bool_]]]

    def slices(self, width: int) -> Iterator[StepBatch]:
        """The same, so many steps at a time."""
        for start in range(0, len(self.steps), width):
            steps = self.steps[start : start + width]
            some, points = slice(start, start + width), self.points
            of_points = slice(*np.searchsorted(points.steps, (steps[0], steps[-1] + 1)).tolist())
            chosen = {name: getattr(points, name)[of_points] for name in _OF_POINTS}
            totals = {key: values[of_points] for key, values in points.totals.items()}
            yield StepBatch(
                selection=self.selection,
                steps=steps,
                times=self.times[some],
                points=replace(points, totals=totals, **chosen),
                layers={key: values[of_points] for key, values in self.layers.items()},
                scalars={name: (values[some], there[some]) for name, (values, there) in self.scalars.items()},
            )


def plan_export(store: Store, run_id: str, *, layers: bool, ranks: bool = False) -> ExportPlan:
    """Read the run's outline once; `layers` False leaves out layers, `ranks` adds each rank's own totals.

    Raises:
        NotFound, Gone: no such run.
    """
    with released_afterwards():
        return _plan(store, run_id, layers=layers, ranks=ranks)


def take_memory(plan: ExportPlan, beside: int = 0) -> None:
    """Hold the plan's memory and `beside` more bytes to the end, and reserve memory for its batches.

    Raises:
        Busy: others hold the memory that a batch takes.
    """
    reserve(plan.held_bytes + beside + plan.batch_bytes)
    hold(plan.held_bytes + beside)


def _plan(store: Store, run_id: str, *, layers: bool, ranks: bool) -> ExportPlan:
    with store.points.snapshot() as snapshot:
        record = snapshot.records([run_id])[run_id]
        measured = snapshot.points([run_id], ("measured_steps",), Selection())[run_id].steps
        scalars = snapshot.scalars([run_id], None, Selection())[run_id]
        known = snapshot.layers(run_id) if layers else []
        streams = snapshot.streams(run_id)
        events, last_event = snapshot.event_count(run_id)
    statistics = list(dict.fromkeys(key for stream in streams for key in stream.statistics))
    numbers = (1 + len(known)) * max(len(statistics), 1)
    return ExportPlan(
        run=record,
        steps=np.unique(np.concatenate([measured, *(entry.steps for entry in scalars.values())])),
        layers=known,
        statistics=[key for key in statistics if not key.startswith("variance_product_root/")],
        scalars=scalars,
        batch_points=min(max(_NUMBERS // numbers, 1), _POINTS),
        measured=measured,
        events=events,
        last_event=last_event,
        ranks=sorted({stream.rank for stream in streams}) if ranks else [],
    )


def read_batches(store: Store, plan: ExportPlan) -> Iterator[StepBatch]:
    """The run from its first step to its last; empty batches are left out."""
    before = -1
    for last in _ends(plan):
        selection = Selection(first_step=before + 1, last_step=last)
        before = last
        with released_afterwards():
            batch = _read(store, plan, selection)
            if len(batch.steps):
                yield batch


def read_ranks(store: Store, plan: ExportPlan, batch: StepBatch) -> Iterator[tuple[int, Points]]:
    """Totals of each rank's whole model over the batch's steps, one rank at a time; who has none is left out."""
    run_id = plan.run.run_id
    for rank in plan.ranks:
        with store.points.snapshot() as snapshot:
            points = snapshot.points([run_id], None, replace(batch.selection, rank=rank))[run_id]
        if len(points.steps):
            yield rank, points


def _ends(plan: ExportPlan) -> list[int]:
    """Last steps of the batches: at most `batch_points` measured, and as many as their logged values allow."""
    measured = np.searchsorted(plan.measured, plan.steps, side="right")
    batch = np.arange(len(plan.steps)) // plan.steps_at_once + (measured - 1) // plan.batch_points
    ends = np.append(np.flatnonzero(np.diff(batch)), len(batch) - 1) if len(batch) else np.zeros(0, dtype=np.int64)
    return [int(step) for step in plan.steps[ends]]


def _read(store: Store, plan: ExportPlan, selection: Selection) -> StepBatch:
    run_id = plan.run.run_id
    with store.points.snapshot() as snapshot:
        points = snapshot.points([run_id], None, selection)[run_id]
        layers = _layers(snapshot, plan, selection, points)
    first, last = selection.first_step or 0, selection.last_step or 0
    logged = {name: _between(entry, first, last) for name, entry in plan.scalars.items()}
    logged = {name: entry for name, entry in logged.items() if len(entry.steps)}
    steps = np.unique(np.concatenate([points.steps, *(entry.steps for entry in logged.values())]))
    hold(_LOGGED_BYTES * len(logged) * len(steps))
    times = np.full(len(steps), -np.inf)
    scalars = {}
    for name, entry in logged.items():
        place = np.searchsorted(steps, entry.steps)
        values, there = np.full(len(steps), np.nan), np.zeros(len(steps), dtype=bool)
        values[place], there[place] = entry.values, True
        times[place] = np.maximum(times[place], entry.times)
        scalars[name] = (values, there)
    place = np.searchsorted(steps, points.steps)
    times[place] = np.maximum(times[place], points.times)
    return StepBatch(selection, steps, times, points, layers, scalars)


def _between(entry: ScalarPoints, first: int, last: int) -> ScalarPoints:
    chosen = slice(*np.searchsorted(entry.steps, (first, last + 1)).tolist())
    return ScalarPoints(entry.steps[chosen], entry.times[chosen], entry.values[chosen])


def _layers(snapshot: Snapshot, plan: ExportPlan, selection: Selection, points: Points) -> dict[str, FloatArray]:
    """Totals by layer at the points' steps, read a few statistics at a time to bound the memory for a chunk."""
    if not plan.layers or not len(points.steps):
        return {}
    run_id, names = plan.run.run_id, tuple(layer.name for layer in plan.layers)
    by_layer = replace(selection, by_layer=True, layers=names)
    keys = list(points.totals)
    group = max(_READ_NUMBERS // (len(points.steps) * len(names)), 1)
    found: dict[str, FloatArray] = {}
    for start in range(0, len(keys), group):
        with released_afterwards():
            part = snapshot.points([run_id], keys[start : start + group], by_layer)[run_id]
        hold(8 * len(part.totals) * len(points.steps) * len(names))
        place = np.searchsorted(points.steps, part.steps)
        for key, values in part.totals.items():
            found[key] = np.full((len(points.steps), len(names)), np.nan)
            found[key][place] = values
    return found
