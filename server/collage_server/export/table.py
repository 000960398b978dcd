"""A run as one wide table: a row a step for the model, one a step and layer, where asked for one a step and rank.

CSV and Parquet are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor.statistics import finish_all, has_interval, metric_keys
from collage_server.export.slabs import ExportPlan, Slab, read_ranks, read_slabs
from collage_server.store import Store

__all__ = ["Columns", "column_names", "place_names", "read_columns", "scalar_columns"]

_PLACES: Final = ("step", "first_step", "time", "ranks", "layer")
_RANK: Final = "rank"
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Columns:
    """Some rows, oldest first, the model before its layers; or those of one `rank`, of the whole model.

    Values are (numbers [rows], present [rows]).

    A metric that is undefined, and a statistic that nobody reported, is absent; a logged NaN is present.
    """

    steps: NDArray[np.int64]
    first_steps: NDArray[np.int64]
    times: FloatArray
    ranks: NDArray[np.int64]
    layers: list[str]
    values: dict[str, tuple[FloatArray, NDArray[np.bool_]]]
    rank: int | None = None


def place_names(plan: ExportPlan) -> tuple[str, ...]:
    """The first columns; `layer` and `rank` are empty in the rows of the whole model, `rank` in those of layers."""
    return (*_PLACES, _RANK) if plan.ranks else _PLACES


def scalar_columns(plan: ExportPlan) -> dict[str, str]:
    """Logged name → column; a name that a metric or statistic has, too, is set apart as `logged/NAME`."""
    taken = {*_PLACES, _RANK, *_computed(plan)}
    return {name: f"logged/{name}" if name in taken else name for name in plan.scalars}


def column_names(plan: ExportPlan) -> list[str]:
    """All columns after the places: logged scalars, metrics with their intervals, statistics."""
    return [*scalar_columns(plan).values(), *_computed(plan)]


def _computed(plan: ExportPlan) -> list[str]:
    names = []
    for key in metric_keys(plan.statistics):
        names.append(key)
        if has_interval(key, plan.statistics):
            names += [f"{key}_low", f"{key}_high"]
    return list(dict.fromkeys([*names, *plan.statistics]))


def read_columns(store: Store, plan: ExportPlan) -> Iterator[Columns]:
    """The table, some rows at a time: all ranks merged, then each of them over the same steps."""
    scalars, computed = scalar_columns(plan), _computed(plan)
    names = [layer.name for layer in plan.layers]
    for slab in read_slabs(store, plan):
        yield _columns(slab, names, scalars, computed)
        for rank, points in read_ranks(store, plan, slab):
            alone = Slab(slab.selection, points.steps, points.times, points, {}, {})
            yield replace(_columns(alone, [], scalars, computed), rank=rank)


@dataclass(frozen=True, eq=False)
class _Order:
    """Where each row comes from: its step within the slab, and its layer, −1 for the model."""

    steps: NDArray[np.int64]
    layers: NDArray[np.int64]
    order: NDArray[np.intp]


def _order(slab: Slab, place: NDArray[np.intp], wide: int) -> _Order:
    """The rows of the model and then those of the layers, put in order."""
    count = len(slab.steps)
    steps = np.concatenate([np.arange(count), np.repeat(place, wide)])
    layers = np.concatenate([np.full(count, -1), np.tile(np.arange(wide), len(place))])
    order = np.lexsort((layers, steps))
    return _Order(steps[order], layers[order], order)


def _columns(slab: Slab, names: list[str], scalars: dict[str, str], computed: list[str]) -> Columns:
    points = slab.points
    place = np.searchsorted(slab.steps, points.steps)
    rows = _order(slab, place, len(names) if slab.layers else 0)
    first_steps, ranks = slab.steps.copy(), np.zeros(len(slab.steps), dtype=np.int64)
    first_steps[place], ranks[place] = points.first_steps, points.ranks
    values = {column: _logged(slab, name, rows) for name, column in scalars.items()}
    titles = ["", *names]
    return Columns(
        steps=slab.steps[rows.steps],
        first_steps=first_steps[rows.steps],
        times=slab.times[rows.steps],
        ranks=ranks[rows.steps],
        layers=[titles[index + 1] for index in rows.layers.tolist()],
        values=values | _measured(slab, place, rows, computed),
    )


def _logged(slab: Slab, name: str, rows: _Order) -> tuple[FloatArray, NDArray[np.bool_]]:
    there = np.zeros(len(rows.order), dtype=bool)
    numbers = np.full(len(rows.order), np.nan)
    if name in slab.scalars:
        values, present = slab.scalars[name]
        model = rows.layers < 0
        numbers[model], there[model] = values[rows.steps[model]], present[rows.steps[model]]
    return numbers, there


def _measured(
    slab: Slab, place: NDArray[np.intp], rows: _Order, computed: list[str]
) -> dict[str, tuple[FloatArray, NDArray[np.bool_]]]:
    model, layers = _finished(slab.points.totals), _finished(slab.layers)
    wide = (len(rows.order) - len(slab.steps)) // max(len(place), 1)
    values = {}
    for key in computed:
        stacked = np.full(len(slab.steps), np.nan)
        stacked[place] = model.get(key, np.nan)
        by_layer = np.full((len(place), wide), np.nan)
        by_layer[:] = layers.get(key, np.nan)
        joined = np.concatenate([stacked, by_layer.ravel()])[rows.order]
        values[key] = (joined, ~np.isnan(joined))
    return values


def _finished(totals: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    if not totals:
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {**finish_all(totals), **totals}
