"""The tensors and tiles that share a scale with the sampled blocks in a low-precision copy, and their largest |θ|.

A bucket asks for it where casts to scaled formats are measured; the formats are
`collage_optim.numerics.cast_formats`'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from collage_optim.from_host import from_host
from collage_optim.numerics.cast_formats import CastFormat, route_of
from collage_optim.tensor_step import local_part
from torch import Tensor

from collage_agent.sample.quantised_states import reading
from collage_agent.sample.sampling import TensorSample
from collage_agent.sample.stored_parts import PARAMETER, Composition
from collage_agent.stats.block_sums import max_norms
from collage_agent.stats.step_view import LargestWeights
from collage_agent.step.gather import BlockLayout
from collage_agent.step.layout import StateLayout

__all__ = ["ScaleRegions", "WholeWeight"]

_READ_AT_ONCE: Final = 2**22


@dataclass(frozen=True)
class WholeWeight:
    """A tensor's stored weight θ: the components that add up to it, each with whether it only completes the visible
    weight."""

    visible: Tensor
    components: Sequence[tuple[Tensor, bool]]
    composition: Composition

    @classmethod
    def of(
        cls,
        parameter: Tensor,
        state: Mapping[str, Any],
        layout: StateLayout,
        composition: Composition,
        sample: TensorSample,
    ) -> WholeWeight:
        """This rank's part of the weight that a sample was drawn from."""
        visible = _own_part(parameter, sample)
        completes = {entry.key: entry.completes for entry in layout.weights}
        components = [
            (visible, False) if key == PARAMETER else (_own_part(reading(state, key), sample), completes[key])
            for key in layout.stored
        ]
        return cls(visible, components, composition)

    def read(self, take: Callable[[Tensor], Tensor]) -> Tensor:
        """θ of the elements that `take` takes of each component, fp64; of a single one in its own dtype."""
        (first, _), *rest = self.components
        total = take(first)
        for component, completes in rest:
            part = take(component)
            total = total.to(torch.float64) + (
                self.composition.residual_of(take(self.visible), part) if completes else part
            )
        return total

    def largest(self) -> Tensor:
        """The largest |θ|, fp64 [()], NaN if one is. A pass over the tensor, in pieces where it is a sum."""
        if len(self.components) == 1:
            return max_norms([self.components[0][0]])[0].to(torch.float64)
        found = [
            self.read(lambda part, start=start: part.reshape(-1)[start : start + _READ_AT_ONCE]).abs().amax()  # type: ignore[misc]
            for start in range(0, self.visible.numel(), _READ_AT_ONCE)
        ]
        return torch.stack(found).amax().to(torch.float64)


class ScaleRegions:
    """The tensors and tiles whose scales the copies of a bucket's sample depend on. Synchronises nothing."""

    def __init__(
        self,
        layout: BlockLayout,
        samples: Sequence[TensorSample],
        parameters: Sequence[Tensor],
        copies: Mapping[str, Sequence[bool]],
    ) -> None:
        """copies: the formats that copies are asked for in, and of which tensors they are known."""
        self._layout = layout
        of_tensor = [known for key, known in copies.items() if route_of(key).last.of_tensor]
        self._of_tensor = [any(known) for known in zip(*of_tensor, strict=True)]
        known_tiles: dict[CastFormat, list[bool]] = {}
        for key, known in copies.items():
            kind = route_of(key).last
            if kind.tile:
                known_tiles[kind] = list(known)
        shapes = [tuple(local_part(parameter).shape) for parameter in parameters]
        self._tiles = {
            kind.tile: _TileIndex(kind.tile, kind.block, layout, samples, shapes, known)
            for kind, known in known_tiles.items()
            if kind.tile
        }

    def __bool__(self) -> bool:
        return bool(self._of_tensor or self._tiles)

    def largest(self, weights: Sequence[WholeWeight]) -> LargestWeights:
        """The largest |θ| around each block now: a pass over tensors with a scale, and over the sampled tiles."""
        of_tensor = None
        if self._of_tensor:
            unknown = torch.full((), torch.nan, dtype=torch.float64, device=self._layout.device)
            found = [
                weight.largest() if known else unknown
                for weight, known in zip(weights, self._of_tensor, strict=True)
            ]
            of_tensor = torch.stack(found)[self._layout.tensor_of_block]
        return LargestWeights(of_tensor, {tile: index.largest(weights) for tile, index in self._tiles.items()})


@dataclass(frozen=True)
class _TilesOfTensor:
    """Tiles of one tensor, read as rows of `columns`: rows from `first` to `last`, and first columns."""

    tensor: int
    columns: int
    first: Tensor
    last: Tensor
    column: Tensor


class _TileIndex:
    """Which tile of `rows` × `columns` each run of `block` neighbours of the sampled blocks lies in.

    Tiles lie in the last two dimensions, or are channels: rows of the first dimension and all others. Those at the
    lower and the right edge may be smaller.
    """

    def __init__(
        self,
        tile: tuple[int, int],
        block: int,
        layout: BlockLayout,
        samples: Sequence[TensorSample],
        shapes: Sequence[tuple[int, ...]],
        known: Sequence[bool],
    ) -> None:
        self._tile, self._block = tile, block
        matrices = [
            (1, 1) if not is_known else shape[-2:] if tile[1] else (shape[0], math.prod(shape[1:]))
            for shape, is_known in zip(shapes, known, strict=True)
        ]
        rows, columns = np.array(matrices, dtype=np.int64).T
        wide = np.where(tile[1], tile[1], columns)
        elements = np.array([sample.elements for sample in samples])
        count = elements // (rows * columns)
        down, across = -(-rows // tile[0]), -(-columns // wide)
        first = np.concatenate(([0], np.cumsum(np.where(known, count * down * across, 1))))
        of = layout.host_tensor_of_block[:, None]
        place = layout.block_numbers[:, None] * layout.block + np.arange(0, layout.block, block)
        place = np.where(np.array(known)[of], np.minimum(place, elements[of] - 1), 0)
        row, column = np.divmod(place, columns[of])
        matrix, row = np.divmod(row, rows[of])
        numbers = first[of] + (matrix * down[of] + row // tile[0]) * across[of] + column // wide[of]
        used, index = np.unique(numbers, return_inverse=True)
        self._device = layout.device
        self._index = from_host(index.reshape(numbers.shape), layout.device)
        self._tensors: list[_TilesOfTensor | int] = []
        for tensor, is_known in enumerate(known):
            own = (
                used[np.searchsorted(used, first[tensor]) : np.searchsorted(used, first[tensor + 1])]
                - first[tensor]
            )
            if not is_known:
                self._tensors.append(len(own))
                continue
            above, right = np.divmod(own, across[tensor])
            above, lower = np.divmod(above, down[tensor])
            begin = above * rows[tensor] + lower * tile[0]
            end = np.minimum(begin + tile[0], (above + 1) * rows[tensor]) - 1
            places = (from_host(part, layout.device) for part in (begin, end, right * wide[tensor]))
            self._tensors.append(_TilesOfTensor(tensor, int(columns[tensor]), *places))

    def largest(self, weights: Sequence[WholeWeight]) -> Tensor:
        """The largest |θ| of each run's tile, fp64 [blocks, runs]; NaN where the tile is not known."""
        found = []
        for tiles in self._tensors:
            if isinstance(tiles, int):
                found.append(torch.full((tiles,), torch.nan, dtype=torch.float64, device=self._device))
            else:
                found += self._maxima(weights[tiles.tensor], tiles)
        return torch.cat(found)[self._index]

    def _maxima(self, weight: WholeWeight, tiles: _TilesOfTensor) -> list[Tensor]:
        found, high = [], self._tile[0]
        # A channel is read as one run, which is a row.
        block, wide = (self._block, self._tile[1]) if self._tile[1] else (tiles.columns, tiles.columns)
        runs = tiles.columns // block
        at_once = max(_READ_AT_ONCE // (high * wide), 1)
        down = torch.arange(high, device=self._device)
        right = torch.arange(wide // block, device=self._device)
        for start in range(0, len(tiles.first), at_once):
            piece = slice(start, start + at_once)
            # Beyond an edge the last row or run is read again: it changes no maximum.
            rows = torch.minimum(tiles.first[piece, None] + down, tiles.last[piece, None]).unsqueeze(2)
            columns = (tiles.column[piece, None] // block + right).clamp_(max=runs - 1).unsqueeze(1)
            places = (rows * runs + columns).view(-1)
            values = weight.read(lambda part, at=places: part.view(-1, block).index_select(0, at))  # type: ignore[misc]
            found.append(values.view(len(rows), -1).abs_().amax(1).to(torch.float64))
        return found


def _own_part(tensor: Tensor, sample: TensorSample) -> Tensor:
    """The part that the sample was drawn from: this rank's shard, or this tensor's piece of a flat parameter."""
    part = local_part(tensor.detach())
    return part if sample.start is None else part.reshape(-1)[sample.start : sample.start + sample.elements]
