"""The view of one measured step, and the sums over it: the interface between a sample and its statistics.

`collage_agent.step` fills a `StepView` (`bucket.py` and `observed_step.py`). The measures of this package read it,
and those that other packages add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

import torch
from torch import Tensor

from collage_monitor.totals_table import Axis, Table

__all__ = [
    "Copies",
    "LargestWeights",
    "MovingAverages",
    "ROWS",
    "StepView",
    "StoredWeights",
    "Sums",
    "named",
    "table_of",
]

ROWS: Final = ("parameter", "gradient", "effective", "visible", "intended")
"""What is kept of an element: θ before the step, g, e, eᵛ, u."""


@dataclass(frozen=True)
class MovingAverages:
    """The averages and sums that an optimizer keeps, in a measured step.

    names: the rows of `states` fp64 [3, names, slots]: |s| before the step, s after it in exact arithmetic, and
    room for s as stored after it. decaying: those that can be judged by how they shrink, and growing, sums, by how
    they grow; others than `names` are new. components: what adds up to each as stored after the step, the leading
    one first, in their own dtypes.
    """

    names: tuple[str, ...]
    states: Tensor
    decaying: tuple[str, ...]
    components: Mapping[str, Sequence[Tensor]]
    growing: tuple[str, ...] = ()


@dataclass(frozen=True)
class LargestWeights:
    """The largest |θ| among the elements that share a scale with each sampled block, at one moment; NaN if unknown.

    tensor: of the whole tensor, fp64 [blocks], or None if not needed. tiles: by rows × columns, of the tile that
    each run of a block lies in, fp64 [blocks, runs].
    """

    tensor: Tensor | None
    tiles: Mapping[tuple[int, int], Tensor]

    def of(self, blocks: slice) -> LargestWeights:
        """The same for some of the blocks."""
        tiles = {tile: found[blocks] for tile, found in self.tiles.items()}
        return LargestWeights(None if self.tensor is None else self.tensor[blocks], tiles)


@dataclass(frozen=True)
class StoredWeights:
    """θ of sampled elements at one moment: [slots], in a dtype that holds it exactly.

    largest: None where no copy has a scale that depends on more than a block. rounds_once_to: a dtype to which
    torch's own cast of the values rounds once; None: none is known.
    """

    values: Tensor
    largest: LargestWeights | None = None
    rounds_once_to: torch.dtype | None = None


@dataclass(frozen=True)
class Copies:
    """The low-precision copies of sampled elements: their sources before and after, and their formats.

    nan_where_unknown: for each format, or route to one, fp64 [blocks], 1, or NaN where a copy of the block's tensor
    depends on elements that are not here.
    """

    before: StoredWeights
    after: StoredWeights
    nan_where_unknown: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepView:
    """A tile of the sampled elements of one measured step. Statistics read it and never write to it.

    parameter θ before the step, gradient g, intended u, effective e, visible eᵛ: fp64 [slots], 0 where `excluded`
    uint8 [slots] is 1: what is not finite, and slots without an element. `finite`: no other element is left out,
    and averages are 0 there, too; unknown on a device. e and eᵛ are one tensor if nothing but the registered
    parameter is stored. `intended_known`: there is a u; without, it is 0.
    registered: θᵛ before the step in its own dtype [slots].
    Slots come in blocks of `block`, each of one tensor: `tensor_of_block` int64 [blocks] is below `tensors`;
    `block_elements` fp64 [blocks] counts the slots that hold an element.

    `classes` counts the elements of each class by block, under the catalogue's names.

    The rest is for the project's own statistics.
    squares: sums of squares by block of each of ROWS. products: u·e and, where it is another, u·eᵛ of each
    element, fp64 [1 or 2, slots].
    visible_parameter: θᵛ in fp64. residual: r before the step, fp64 (None: the weight is not kept as a sum), and
    `residual_after` in its own dtype.
    held: uint8 [slots], 1 where r was not 0 (None: not known), when the step before was over if `adjacent`, else
    some steps sooner. decay: lr·λ of decoupled decay.
    scales: fp64 [blocks] of fp8 where counterfactuals are asked for. copies: where weights are kept wider than a
    copy of them that is asked for.
    """

    parameter: Tensor
    gradient: Tensor
    intended: Tensor
    effective: Tensor
    visible: Tensor
    excluded: Tensor
    finite: bool
    intended_known: bool
    registered: Tensor
    block: int
    tensor_of_block: Tensor
    tensors: int
    block_elements: Tensor
    classes: Table[Tensor]
    squares: Mapping[str, Tensor]
    products: Tensor
    averages: MovingAverages
    visible_parameter: Tensor
    residual: Tensor | None
    residual_after: Tensor | None
    held: Tensor | None
    adjacent: bool
    decay: float | Tensor | None
    scales: Tensor | None
    copies: Copies | None

    @cached_property
    def registered_in_fp32(self) -> Tensor:
        """`registered` in fp32, which holds it."""
        return self.registered.to(torch.float32)


@dataclass(frozen=True)
class Sums:
    """The sums of a statistic over one view, by its key: fp64 [blocks], and fp64 [tensors] of what has no
    blocks."""

    by_block: Mapping[str, Tensor] = field(default_factory=dict)
    by_tensor: Mapping[str, Tensor] = field(default_factory=dict)


def table_of(sums: Mapping[str, Tensor]) -> Table[Tensor]:
    """The sums, one at least, as one table."""
    if isinstance(sums, Table):
        return sums
    return Table(_axis(tuple(sums)), None, torch.stack(list(sums.values())))


def named(keys: Sequence[str], rows: Tensor) -> Table[Tensor]:
    """Rows of sums under these keys."""
    return Table(_axis(tuple(keys)), None, rows)


@lru_cache(maxsize=256)
def _axis(keys: tuple[str, ...]) -> Axis:
    """The same keys come with every step: their places are worked out once."""
    return Axis(keys)
