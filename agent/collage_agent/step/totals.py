"""From sums by block to estimated totals by layer, or from sums of every element, and from all parts to one table.

Keys are the catalogue's; the rows and columns of each part find their places by name.

Scaling from sample to tensor happens here alone. The catalogue defines each total, and both change together
(`tests/agent/stats/test_sums.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from collage_optim import CollageOptimizer, FoundTotals, StepTotals
from collage_optim.from_host import from_host
from collage_optim.integer_codes import unpacked
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.sample.sampling import TensorSample
from collage_agent.sample.stored_parts import decaying
from collage_agent.stats import MEASURES, OPTIONAL, StepView, Sums, classes, edq, update_histogram
from collage_agent.stats.block_sums import Segments
from collage_agent.stats.classes import active_elements
from collage_agent.stats.intervals import (
    UNSEEN,
    fourth_moments,
    interval_keys,
    population_factor,
    product_rows,
    ratio_variances,
)
from collage_agent.stats.step_view import table_of
from collage_agent.step.gather import BlockLayout
from collage_agent.training.watched_parameters import WatchedParameter
from collage_monitor.definitions import SAMPLE, Interval
from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import METRICS, statistic
from collage_monitor.totals_table import Axis, Table

__all__ = [
    "BlockTotals",
    "KernelTotals",
    "SIZE_ROWS",
    "SampleSizes",
    "TableUnion",
    "combine_tiles",
    "estimated_totals",
    "is_fast_in_fp64",
    "measure_tile",
]

_FIXED: Final = ("measured_steps", "elements", "sampled")
SIZE_ROWS: Final = len(_FIXED)
"""The first rows of a table of totals: what is known of a tensor before anything is measured."""
_PLACES: Final = 256
_Part = tuple[Axis, Axis, torch.device]


def _ratios_of(keys: Collection[str]) -> dict[str, Interval]:
    """Metrics with an interval on the sample of all statistics, that sums under these keys have; the oracle's has
    a sample of its own."""
    return {
        name: pair
        for name, entry in METRICS.items()
        if (pair := entry.interval) is not None
        and pair.sample == SAMPLE
        and pair.numerator in keys
        and (pair.denominator == "active" or pair.denominator in keys)
    }


_BASE: Final = (*edq.NORM_KEYS, *edq.EDQ_KEYS, *classes.KEYS, *update_histogram.KEYS)
_OF_DECREMENTS: Final = (
    "state_decrement_intended_sum",
    "state_decrement_observed_sum",
    "state_rounding_variance",
)
_FAST_IN_FP64: Final = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (9, 4), (10, 0)})
"""Compute capabilities of devices that take 2 to 4 times as long in fp64 as in fp32: P100 to B200, and MI300."""
_NOTHING: Final = "effective_squared_sum_without_u"
_BASE_STATISTICS: Final = (*_FIXED, *_BASE, *interval_keys(_ratios_of(_BASE)), UNSEEN)
"""What every measured step of every optimizer reports, as NaN where it is missing."""


@dataclass(frozen=True)
class BlockTotals:
    """The sums over a bucket's blocks, before they are split by tensor.

    by_block: tables [statistic][block], with the same rows whatever the step; by_tensor: [statistic][tensor].
    """

    by_block: Sequence[Table[Tensor]]
    by_tensor: Sequence[Table[Tensor]]


def measure_tile(view: StepView) -> list[Sums]:
    """The sums of each measure over a tile, except measures whose input the view lacks."""
    found = []
    for name, measure in MEASURES.items():
        if name not in OPTIONAL or getattr(view, OPTIONAL[name]) is not None:
            sums = measure(view)
            found.append(sums if isinstance(sums, Sums) else Sums(sums))
    return found


def combine_tiles(tiles: Sequence[Sequence[Sums]]) -> BlockTotals:
    """The tiles' sums together: those by block concatenated, those by tensor added; none of a failed measure."""
    by_block: list[Table[Tensor]] = []
    by_tensor: list[Table[Tensor]] = []
    for same_measure in zip(*tiles, strict=True):
        tables = [table_of(sums.by_block) for sums in same_measure if sums.by_block]
        if tables and len(tables) == len(same_measure):
            by_block.append(_concatenated(tables))
        tables = [table_of(sums.by_tensor) for sums in same_measure if sums.by_tensor]
        if tables and len(tables) == len(same_measure):
            total = tables[0].array
            for table in tables[1:]:
                total = total + table.array
            by_tensor.append(Table(tables[0].statistics, None, total))
    return BlockTotals(by_block, by_tensor)


def _concatenated(tables: Sequence[Table[Tensor]]) -> Table[Tensor]:
    if len(tables) == 1:
        return tables[0]
    return Table(tables[0].statistics, None, torch.cat([table.array for table in tables], 1))


@dataclass(frozen=True)
class _Rows:
    """The meaning of the rows of a bucket's table, made once for the keys of its statistics.

    `factor` fp64 [rows, tensors] turns sums over the sample into estimated totals; NaN: the bucket cannot know it.
    `numerators` and `denominators` int64 [ratios]: which of the sums by block a ratio is made of, elements with
    u ≠ 0 behind the last. `tailed`: ratios that are no shares; `spread`: the row of the variance of Σ u².
    """

    axis: Axis
    factor: Tensor
    numerators: Tensor
    denominators: Tensor
    tailed: Tensor
    spread: int

    def of_ratios(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators and denominators, a row for each of the ratios."""
        return sums.index_select(0, self.numerators), sums.index_select(0, self.denominators)


class SampleSizes:
    """Sizes of a layout's samples, fp64 [tensors] on its device: made once, so that no step copies them there."""

    def __init__(self, samples: Sequence[TensorSample], layout: BlockLayout) -> None:
        device = layout.device

        def vector(values: Sequence[int]) -> Tensor:
            return from_host(torch.tensor(values, dtype=torch.float64), device)

        self.segments = Segments(layout.tensor_of_block, len(samples))
        self.elements = vector([sample.elements for sample in samples])
        self.sampled = vector([sample.sampled for sample in samples])
        self.blocks = vector([sample.blocks for sample in samples])
        self.factor = population_factor(self.blocks, vector([sample.population_blocks for sample in samples]))
        self.scale = self.elements / self.sampled
        self.fixed = torch.stack((torch.ones_like(self.elements), self.elements, self.sampled))
        self._rows: dict[tuple[tuple[Axis, ...], frozenset[str]], _Rows] = {}

    def rows(self, blocks: BlockTotals, missing: frozenset[str]) -> _Rows:
        """The rows of a table of these sums; `missing`: the required inputs that the step lacked."""
        tables = (*blocks.by_block, *blocks.by_tensor)
        name = tuple([table.statistics for table in tables]), missing
        known = self._rows.get(name)
        if known is None:
            if len(self._rows) >= _PLACES:
                self._rows.clear()
            keys = [key for table in tables for key in table.statistics]
            by_block = sum(len(table.statistics) for table in blocks.by_block)
            known = self._rows[name] = self._make_rows(keys, by_block, missing)
        return known

    def _make_rows(self, keys: Sequence[str], by_block: int, missing: frozenset[str]) -> _Rows:
        ratios = _ratios_of(keys)
        pairs = tuple(ratios.values())
        every = [*_FIXED, *keys, *interval_keys(ratios), UNSEEN]
        if len(set(every)) < len(every):
            twice = {key for key in every if every.count(key) > 1}
            raise CatalogueError(f"{', '.join(sorted(twice))}: measured twice; a statistic has one definition")
        under = [by_block if pair.denominator == "active" else keys.index(pair.denominator) for pair in pairs]
        return _Rows(
            axis=Axis(every),
            factor=self.factors(every, missing),
            numerators=self._indices([keys.index(pair.numerator) for pair in pairs]),
            denominators=self._indices(under),
            tailed=self._indices([index for index, pair in enumerate(pairs) if not pair.share]),
            spread=len(pairs) + list(ratios).index("edq_ratio"),
        )

    def _indices(self, values: Sequence[int]) -> Tensor:
        return from_host(torch.tensor(values, dtype=torch.int64), self.scale.device)

    def factors(self, keys: Sequence[str], missing: frozenset[str] = frozenset()) -> Tensor:
        """The factors from sums over the sample to estimated totals, fp64 [rows, tensors]; NaN if the statistic
        needs a `missing` input."""
        scale = self.scale
        rows = torch.stack((torch.ones_like(scale), scale, scale * scale, torch.full_like(scale, torch.nan)))
        wanted = []
        for key in keys:
            entry = statistic(key)
            power = 0 if entry.raw or entry.label == "metric" else 2 if entry.variance else 1
            wanted.append(3 if missing & {*entry.needs} else power)
        return rows.index_select(0, self._indices(wanted))


def estimated_totals(
    blocks: BlockTotals, sizes: SampleSizes, layers: Axis, missing: frozenset[str], missed: Tensor
) -> Table[Tensor]:
    """Estimated totals of one measured step, [statistic][layer].

    Sums and counts are multiplied by elements / sampled, but for those that the catalogue calls raw. Statistics
    that need a `missing` input, the intended update or the gradient, are NaN. missed: `missed_share` fp64
    [tensors]. No synchronisation.
    """
    rows = sizes.rows(blocks, missing)
    counts = next(table for table in blocks.by_block if "lost" in table.statistics)
    sampled = torch.cat([*[table.array for table in blocks.by_block], active_elements(counts).unsqueeze(0)])
    sums = sizes.segments.sums(sampled)
    parts, totals = rows.of_ratios(sampled), rows.of_ratios(sums)
    products = sizes.segments.sums(product_rows(*parts))
    variances = ratio_variances(products, *totals, sizes.blocks, sizes.factor)
    numerators, denominators = (row.index_select(0, rows.tailed) for row in totals)
    values = torch.nan_to_num(numerators / denominators, 0.0, 0.0, 0.0)
    numerators, denominators = (row.index_select(0, rows.tailed) for row in parts)
    fourth = fourth_moments(numerators, denominators, values, sizes.segments, sizes.factor)
    spread = variances[rows.spread]
    unseen = (missed * spread).unsqueeze(0)
    others = [table.array for table in blocks.by_tensor]
    array = torch.cat((sizes.fixed, sums[:-1], *others, variances, fourth, unseen)).mul_(rows.factor)
    return Table(rows.axis, layers, array)


@dataclass(frozen=True)
class _WholeLayers:
    """Which rows and columns of found sums are the totals of which layers. fixed fp64 [3, layers]: `_FIXED`."""

    places: tuple[int, ...]
    statistics: Axis
    layers: Axis
    rows: Tensor
    columns: Tensor
    fixed: Tensor

    def of(self, sums: Tensor) -> Table[Tensor]:
        """The table, from sums fp64 [parameters, columns]. Without a sample, what a sample leaves open is 0."""
        found = sums.index_select(0, self.rows).index_select(1, self.columns).t()
        closed = found.new_zeros(len(self.statistics) - len(self.fixed) - len(found), len(self.rows))
        return Table(self.statistics, self.layers, torch.cat((self.fixed, found, closed)))


class KernelTotals:
    """Totals that an optimizer of ours adds up in the kernels of its steps: of every element, no sample.

    Call `ask` before a measured step and `tables` after it. Where a step is no kernel, as on a CPU, there are none,
    and neither where fp64 is slow (`is_fast_in_fp64`). Synchronises nothing.
    """

    def __init__(self) -> None:
        self.covered: frozenset[int] = frozenset()
        """Places of the watched parameters that the last `tables` had."""
        self._asked: tuple[CollageOptimizer, StepTotals] | None = None
        self._watched: Sequence[WatchedParameter] = ()
        self._known: dict[tuple[object, ...], _WholeLayers] = {}

    def ask(self, optimizer: Optimizer | None) -> None:
        """Have the step about to be taken add up its totals, if the optimizer is one of ours; None: none."""
        self._asked = None
        if not (isinstance(optimizer, CollageOptimizer) and optimizer.has_rules_step):
            return
        if all(is_fast_in_fp64(group["params"][0].device) for group in optimizer.param_groups if group["params"]):
            # Two watches of one optimizer look at the same sums.
            optimizer.step_totals = optimizer.step_totals or StepTotals()
            self._asked = optimizer, optimizer.step_totals

    def tables(self, watched: Sequence[WatchedParameter]) -> list[Table[Tensor]]:
        """The totals of the step just taken, a table for each launch."""
        if self._watched is not watched or len(self._known) >= _PLACES:
            self._watched, self._known = watched, {}
        asked, self._asked = self._asked, None
        found, covered = [], set[int]()
        for optimizer, launch in () if asked is None else [(asked[0], launch) for launch in asked[1].found]:
            name = (launch.names, *map(id, launch.parameters))
            layers = self._known.get(name)
            if layers is None:
                layers = self._known[name] = _whole_layers(launch, watched, optimizer)
            if layers.places:
                covered.update(layers.places)
                found.append(layers.of(launch.sums))
        self.covered = frozenset(covered)
        return found


@lru_cache(maxsize=64)
def is_fast_in_fp64(device: torch.device) -> bool:
    """Whether a device adds up totals in about the time of a step. Others have one fp64 unit for 32 fp32 ones or
    more, and would take several times as long."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _FAST_IN_FP64


def _whole_layers(
    launch: FoundTotals, watched: Sequence[WatchedParameter], optimizer: CollageOptimizer
) -> _WholeLayers:
    places = {id(entry.parameter): place for place, entry in enumerate(watched) if entry.stepped}
    rows = [row for row, parameter in enumerate(launch.parameters) if id(parameter) in places]
    own = [places[id(launch.parameters[row])] for row in rows]
    state: Mapping[str, Any] = unpacked(optimizer.state[launch.parameters[0]])
    keys = [key for key in launch.names if _is_told(key, state)]
    ratios = _ratios_of(keys)
    statistics = Axis([*_FIXED, *keys, _NOTHING, *interval_keys(ratios), UNSEEN])
    elements = torch.tensor([float(watched[place].shard.elements) for place in own], dtype=torch.float64)
    fixed = torch.stack((torch.ones_like(elements), elements, elements))
    columns = torch.tensor([launch.names.index(key) for key in keys])
    device = launch.sums.device
    return _WholeLayers(
        tuple(own),
        statistics,
        Axis(watched[place].name for place in own),
        from_host(torch.tensor(rows, dtype=torch.int64), device),
        from_host(columns, device),
        from_host(fixed, device),
    )


def _is_told(key: str, state: Mapping[str, Any]) -> bool:
    """Whether a sum says something: only averages that decay are judged by how they shrink."""
    name, _, label = key.partition("/")
    return name not in _OF_DECREMENTS or decaying(state, label)


class TableUnion:
    """The statistics and layers of everything watched; both only grow.

    Parts are tables of some statistics and some layers, of buckets, oracles and windows of one optimizer or more.
    """

    def __init__(self) -> None:
        self.statistics = Axis(_BASE_STATISTICS)
        self.layers = Axis()
        self._places: dict[_Part, tuple[Tensor, Tensor]] = {}

    def of(self, parts: Sequence[Table[Tensor]]) -> Table[Tensor]:
        """All parts in one table, on the first one's device; NaN where no part says anything, a later part wins.

        Watched layers are included whether reported or not. No synchronisation, once the places of a part's
        rows and columns are known on the device.
        """
        device = parts[0].array.device if parts else torch.device("cpu")
        places = [self._place(part, device) for part in parts]
        shape = (len(self.statistics), len(self.layers))
        array = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        for place, part in zip(places, parts, strict=True):
            array[place] = part.array.to(device)
        return Table(self.statistics, self.layers, array)

    def _place(self, part: Table[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        assert part.layers is not None
        name = part.statistics, part.layers, device
        known = self._places.get(name)
        if known is None:
            if len(self._places) >= _PLACES:
                self._places.clear()
            self.statistics.extend(part.statistics)
            rows = torch.tensor(self.statistics.positions(part.statistics)).unsqueeze(1)
            columns = torch.tensor(self.layers.positions(part.layers)).unsqueeze(0)
            known = self._places[name] = from_host(rows, device), from_host(columns, device)
        return known
