"""All measurements since attach, in bounded memory: older steps are merged with their neighbours when it is full.

`summary()` and the printed verdict read it; the server keeps a history of its own. Merging follows the contract's
rules (`tests/agent/watching/test_step_history.py`), the bound on memory is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from collage_optim.from_host import from_host
from numpy.typing import NDArray
from torch import Tensor

from collage_agent.measurement import Layout, Measurement
from collage_monitor.definitions import HISTOGRAM_LABELS
from collage_monitor.diagnosis import RECENT_STEPS, recent_points
from collage_monitor.forecast import GridRecord, record_of
from collage_monitor.metrics import split_key, statistic

__all__ = [
    "MODEL",
    "PastTotals",
    "StepHistory",
]

Array = NDArray[np.float64]
Rules = Mapping[str, Tensor]
"""Merge rule → the rows that merge by it, int64 on the tables' device."""

MODEL: Final = 0
"""Column of the whole model; layer i stands in column i + 1."""
_BYTES: Final = 8 * 2**20
_FEWEST_POINTS, _MOST_POINTS = 4, 64
_TOGETHER: Final = 8
_WAITING_BYTES: Final = 2**20
_GRID_KEYS: Final = tuple(f"update_ulp_histogram/{label}" for label in HISTOGRAM_LABELS)
_MOST_GRIDS: Final = 64
_GRID_BYTES: Final = 4 * 2**20
_LEFT_OUT: Final = ("octave", "method/dtype")
"""Labels of statistics that no judgement reads: histograms and counterfactuals, most of a table's rows."""


@dataclass(frozen=True)
class _Point:
    """Totals [statistic][1 + layers] of measured steps, merged; `roots` are those of `variance_product_root`."""

    first_step: int
    last_step: int
    array: Tensor
    roots: Tensor


@dataclass(frozen=True)
class PastTotals:
    """Totals on the host, [points][1 + layers] by statistic: the model first. Point i merges the measured steps
    first_steps[i] to last_steps[i]."""

    first_steps: tuple[int, ...]
    last_steps: tuple[int, ...]
    totals: Mapping[str, Array]

    def recent(self, since: int) -> PastTotals:
        """The points of the recent past; since: the last change (`collage_monitor.diagnosis.last_change`)."""
        measured, squares = (
            np.nan_to_num(self.totals[key][:, MODEL]).tolist() for key in ("measured_steps", "intended_squared_sum")
        )
        taken = recent_points(self.last_steps, measured, squares, since)
        recent = {key: values[-taken:] for key, values in self.totals.items()}
        return PastTotals(self.first_steps[-taken:], self.last_steps[-taken:], recent)


class GridHistory:
    """Histograms of |u| / gap of measured steps; when full, every second one is dropped.

    They are not merged as other totals are: each is of another rate, and a forecast scales each by its own.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._layout: Layout | None = None
        self._rows: Tensor | None = None
        self._every = 1
        self._seen = 0
        self._kept: list[tuple[int, Tensor]] = []

    def add(self, layout: Layout, steps: Sequence[int], totals: Tensor) -> None:
        """Keep measured steps, thinned if there are more than needed. No synchronisation.

        totals: [steps, statistics, layers]; a copy of the histograms is kept on its device.
        """
        if layout is not self._layout:
            self._read_layout(layout, totals.device)
        if self._rows is None:
            return
        counts = totals.index_select(1, self._rows).float()
        for place, step in enumerate(steps):
            self._seen += 1
            if self._seen % self._every == 0:
                self._kept.append((step, counts[place].clone()))
        while len(self._kept) > 3 and (len(self._kept) >= _MOST_GRIDS or self._size() > _GRID_BYTES):
            del self._kept[-2::-2]
            self._every *= 2
        self.bytes = self._size()

    def record(self, strategy: str) -> GridRecord | None:
        """The input of a forecast; None before the first step with an intended update. Synchronises the device."""
        layout = self._layout
        if layout is None or not self._kept:
            return None
        columns = len(layout.layers)
        wide = [_padded(counts, len(_GRID_KEYS), columns) for _, counts in self._kept]
        counts = torch.stack(wide, 1).double().cpu().numpy()
        return record_of([step for step, _ in self._kept], counts, layout.layers, strategy)

    def _size(self) -> int:
        return sum(counts.nbytes for _, counts in self._kept)

    def _read_layout(self, layout: Layout, device: torch.device) -> None:
        places = {key: row for row, key in enumerate(layout.statistics)}
        self._layout = layout
        if all(key in places for key in _GRID_KEYS):
            self._rows = from_host(torch.tensor([places[key] for key in _GRID_KEYS], dtype=torch.int64), device)


class StepHistory:
    """Measured steps, each a point at first; when full, all neighbours but the newest are merged in the same way.

    Adding waits for nothing, and costs a few operations on the tables' device for _TOGETHER measured steps, or so
    many as are _WAITING_BYTES; `past` synchronises the device.
    """

    def __init__(self, limit_bytes: int = _BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._layout: Layout | None = None
        self._keys: list[str] = []
        self._rows = torch.empty(0, dtype=torch.int64)
        self._pairs: list[tuple[int, int, str]] = []
        self._over_shards: Rules = {}
        self._over_steps: Rules = {}
        self._steps_per_point = 1
        self._points: list[_Point] = []
        self._points_before = 0
        """How many of them are from before the last change."""
        self._unmerged: list[_Point] = []
        self._waiting: list[Measurement] = []
        self._grids = GridHistory()

    @property
    def bytes(self) -> int:
        """Memory of the kept totals, without the last measured step's own."""
        points = sum(point.array.nbytes + point.roots.nbytes for point in (*self._points, *self._unmerged))
        return points + self._grids.bytes + sum(measurement.totals.nbytes for measurement in self._waiting[:-1])

    def add(self, measurement: Measurement) -> None:
        """Keep a measured step. No synchronisation."""
        if self._waiting and measurement.layout is not self._waiting[0].layout:
            self._take_in()
        self._waiting.append(measurement)
        waiting = len(self._waiting)
        if waiting == _TOGETHER or waiting * measurement.totals.nbytes >= min(_WAITING_BYTES, self._limit_bytes):
            self._take_in()

    def begin_anew(self) -> None:
        """Weights and states are kept otherwise from now on: later steps are not merged with those so far. No
        synchronisation."""
        self._take_in()
        self._merge_older(0)
        if self._unmerged:
            self._points.append(self._merged(self._unmerged))
            self._unmerged = []
        self._points_before = len(self._points)

    def _take_in(self) -> None:
        """Make points of the measurements that wait, all of one layout."""
        taken, self._waiting = self._waiting, []
        if taken and taken[0].layout is not self._layout:
            self._read_layout(taken[0].layout, taken[0].totals.device)
        if taken:
            totals = torch.stack([measurement.totals for measurement in taken])
            self._grids.add(taken[0].layout, [measurement.step for measurement in taken], totals)
            layers = totals.index_select(1, self._rows)
            model = _reduced(layers.permute(2, 1, 0), self._over_shards)
            arrays = torch.cat((model.t().unsqueeze(2), layers), 2)
            roots = [
                (arrays[:, a].clamp(min=0).sqrt() * arrays[:, b].clamp(min=0).sqrt()) for a, b, _ in self._pairs
            ]
            own = torch.stack(roots, 1) if roots else arrays[:, :0]
            for measurement, array, root in zip(taken, arrays, own, strict=True):
                self._keep(_Point(measurement.step, measurement.step, array, root))

    def _keep(self, point: _Point) -> None:
        self._unmerged.append(point)
        size = point.array.nbytes + point.roots.nbytes
        most = 2 * max(_FEWEST_POINTS, min(_MOST_POINTS, self._limit_bytes // max(size, 1)))
        # The recent past of single steps begins where a server's does.
        newest = min(RECENT_STEPS, most // 4)
        self._merge_older(newest)
        # Tables that grew leave room for far fewer points than there are.
        while len(self._points) + newest >= most:
            before, since = self._points[: self._points_before], self._points[self._points_before :]
            self._points = [
                self._merged(part[i : i + 2]) for part in (before, since) for i in range(0, len(part), 2)
            ]
            self._points_before = -(-len(before) // 2)
            self._steps_per_point *= 2

    def _merge_older(self, newest: int) -> None:
        """Make points of the single steps before the `newest` ones, as far as they fill points."""
        while len(self._unmerged) >= newest + self._steps_per_point:
            self._points.append(self._merged(self._unmerged[: self._steps_per_point]))
            del self._unmerged[: self._steps_per_point]

    def past(self) -> PastTotals | None:
        """Everything kept, oldest first; None before the first measured step. Synchronises the device."""
        self._take_in()
        points = [*self._points, *self._unmerged]
        if not points:
            return None
        array = torch.stack([self._widened(point).array for point in points], 1).cpu().numpy()
        roots = torch.stack([self._widened(point).roots for point in points], 1).cpu().numpy()
        names = [f"variance_product_root/{metric}" for _, _, metric in self._pairs]
        totals = dict(zip(self._keys, array, strict=True)) | dict(zip(names, roots, strict=True))
        return PastTotals(
            tuple(point.first_step for point in points), tuple(point.last_step for point in points), totals
        )

    def grids(self, strategy: str) -> GridRecord | None:
        """The input of a forecast; None before the first step with an intended update. Synchronises the device."""
        self._take_in()
        return self._grids.record(strategy)

    def _read_layout(self, layout: Layout, device: torch.device) -> None:
        """Which rows are kept, and how they merge; a later layout only appends to them."""
        self._layout = layout
        rows = [row for row, key in enumerate(layout.statistics) if statistic(key).label not in _LEFT_OUT]
        self._keys = [layout.statistics[row] for row in rows]
        self._rows = from_host(torch.tensor(rows, dtype=torch.int64), device)
        entries = [statistic(key) for key in self._keys]
        self._over_shards = _rules([entry.over_shards for entry in entries], device)
        self._over_steps = _rules([entry.over_steps for entry in entries], device)
        places = {key: place for place, key in enumerate(self._keys)}
        self._pairs = [
            (places[key], places[f"variance_denominator/{metric}"], metric)
            for key in self._keys
            if (metric := split_key(key)[1] or "") and key == f"variance_numerator/{metric}"
        ]

    def _merged(self, points: Sequence[_Point]) -> _Point:
        """Neighbours as one."""
        if len(points) == 1:
            return points[0]
        wide = [self._widened(point) for point in points]
        array = _reduced(torch.stack([point.array for point in wide]), self._over_steps)
        roots = torch.stack([point.roots for point in wide])
        missing = roots.isnan().all(0)
        return _Point(
            points[0].first_step, points[-1].last_step, array, roots.nansum(0).masked_fill_(missing, torch.nan)
        )

    def _widened(self, point: _Point) -> _Point:
        """The point with room for statistics and layers that came after it, as NaN."""
        layout = self._layout
        assert layout is not None
        columns = 1 + len(layout.layers)
        if point.array.shape == (len(self._keys), columns) and len(point.roots) == len(self._pairs):
            return point
        return _Point(
            point.first_step,
            point.last_step,
            _padded(point.array, len(self._keys), columns),
            _padded(point.roots, len(self._pairs), columns),
        )


def _padded(array: Tensor, rows: int, columns: int) -> Tensor:
    more = (0, columns - array.shape[1], 0, rows - array.shape[0])
    return torch.nn.functional.pad(array, more, value=torch.nan)


def _rules(names: Sequence[str], device: torch.device) -> Rules:
    return {
        rule: from_host(
            torch.tensor([row for row, name in enumerate(names) if name == rule], dtype=torch.int64), device
        )
        for rule in dict.fromkeys(names)
    }


def _reduced(values: Tensor, rules: Rules) -> Tensor:
    """values [parts, statistics, …] merged over the parts, each statistic by its rule; NaN is "not reported".

    The rules are those of `collage_monitor.statistics.merge`, written in torch: reading the tables back for it
    would synchronise the device. `tests/agent/watching/test_step_history.py` holds the two equal, rule by rule.
    """
    merged = torch.full_like(values[0], torch.nan)
    for rule, rows in rules.items():
        part = values.index_select(1, rows)
        missing = part.isnan()
        merged[rows] = _REDUCED_BY[rule](part, missing).masked_fill_(missing.all(0), torch.nan)
    return merged


def _last(part: Tensor, missing: Tensor) -> Tensor:
    newest = part[0]
    for values, absent in zip(_rest(part), _rest(missing), strict=True):
        newest = torch.where(absent, newest, values)
    return newest.clone()


def _rest(tensor: Tensor) -> Iterator[Tensor]:
    return iter(tensor[1:])


_REDUCED_BY = {
    "sum": lambda part, missing: part.nansum(0),
    "root_sum": lambda part, missing: part.clamp(min=0).sqrt().nansum(0).square_(),
    "fourth_root_sum": lambda part, missing: part.clamp(min=0).pow(0.25).nansum(0).pow_(4),
    "max": lambda part, missing: part.masked_fill(missing, -torch.inf).amax(0),
    "min": lambda part, missing: part.masked_fill(missing, torch.inf).amin(0),
    "last": _last,
}
