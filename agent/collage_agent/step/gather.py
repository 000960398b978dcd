"""Gathering the sampled blocks of many tensors into one flat buffer, a few calls for all of them.

Buffers are reused from step to step and owned here. The order of elements is the layout's and is free to change;
that a gathered sample equals a plain index is tested in `tests/agent/sample/test_sampling.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from collage_optim import SCALE_SUFFIX
from collage_optim.blocks import BLOCK_ELEMENTS
from collage_optim.from_host import from_host
from collage_optim.integer_codes import decoded
from collage_optim.tensor_step import local_part
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from collage_agent.sample.quantised_states import reading
from collage_agent.sample.sampling import TensorSample
from collage_agent.sample.stored_parts import GRADIENT, PARAMETER, Composition
from collage_agent.stats.block_sums import max_norms
from collage_agent.step.device_gather import DeviceGather
from collage_agent.step.layout import KeptState

__all__ = ["BlockLayout", "GatheredSample", "Source", "Staging", "TensorViews"]

_PLAIN: Final = {Tensor, Parameter}
_EMPTY: Final = np.empty(0, dtype=np.int64)
_MOST_BLOCKS: Final = 2**40
_MANY: Final = 16
"""Fewest tensors of one shape that one call joins; for fewer, the call costs more than views do."""


class BlockLayout:
    """Where the sampled blocks of several tensors lie in a flat buffer of `slots` = blocks · block elements.

    First come the full blocks of the sampled tensors, by `index_select`. Next come tensors measured whole, if many
    have one shape, by one `cat` per shape. Last come the other tensors measured whole, and the ragged tails: one
    `cat` copies them all, each padded to whole blocks with zeros. On a CUDA device one launch copies all of it
    (`device_gather`).
    `tensor_of_block` [blocks] int64 is a tensor's place, and
    `host_tensor_of_block` the same on the host, where `block_numbers` says which of its tensor's blocks each one
    is; `padding` lists the padded slots.
    """

    def __init__(self, samples: Sequence[TensorSample], parameters: Sequence[Tensor]) -> None:
        self.block = samples[0].block
        self.device = local_part(parameters[0]).device
        self._orders = [_memory_order(local_part(parameter)) for parameter in parameters]
        self._parts = [
            None if sample.start is None else slice(sample.start, sample.start + sample.elements)
            for sample in samples
        ]
        self._plain = {type(parameter) for parameter in parameters} <= _PLAIN
        self.row_major = all(order is None for order in self._orders)
        self._simple = self._plain and self.row_major and all(part is None for part in self._parts)
        self._elements = [sample.elements for sample in samples]
        self._sampled: list[tuple[int, slice]] = []
        tensors, numbers = [_EMPTY], [_EMPTY]
        count = 0
        for tensor, sample in enumerate(samples):
            if not sample.whole and len(sample.rows):
                length = len(sample.rows)
                self._sampled.append((tensor, slice(count, count + length)))
                tensors.append(np.full(length, tensor))
                numbers.append(sample.rows)
                count += length
        self._boundary = count * self.block
        self._alike: list[tuple[list[int], slice, torch.Size]] = []
        for members in self._of_one_shape(samples, parameters) if self._simple else ():
            start, shape = self._boundary, parameters[members[0]].shape
            self._boundary += len(members) * shape.numel()
            self._alike.append((members, slice(start, self._boundary), shape))
        first = [tensor for members, _, _ in self._alike for tensor in members]
        others = sorted({*range(len(samples))}.difference(first))
        # Two lists, because 20,000 pairs would set off a garbage collection that visits all tensors.
        pieces = [tensor for tensor in (*first, *others) if _length(samples[tensor])]
        of, lengths = np.array([pieces, [_length(samples[tensor]) for tensor in pieces]], dtype=np.int64)
        blocks = -(-lengths // self.block)
        missing = blocks * self.block - lengths
        ends = count + blocks.cumsum()
        told = (column[len(first) :].tolist() for column in (of, lengths, missing))
        self._pieces = list(zip(*told, strict=True))
        self._viewed = [entry[0] for entry in self._sampled] + [entry[0] for entry in self._pieces]
        population = np.array([samples[tensor].population_blocks for tensor in pieces], dtype=np.int64)
        tensors.append(np.repeat(of, blocks))
        numbers.append(np.arange(count, count + blocks.sum()) + np.repeat(population - ends, blocks))
        count += int(blocks.sum())
        padded = missing > 0
        ends, missing = ends[padded] * self.block, missing[padded]
        self.padding = [
            slot
            for end, lacking in zip(ends.tolist(), missing.tolist(), strict=True)
            for slot in range(end - lacking, end)
        ]
        self._chosen = [samples[tensor].rows.astype(np.intp) for tensor, _ in self._sampled]
        self.blocks = count
        self.slots = count * self.block
        self.host_tensor_of_block = np.concatenate(tensors)
        self.tensor_of_block = from_host(self.host_tensor_of_block, self.device)
        self.block_numbers = np.concatenate(numbers)
        self._keys = self.host_tensor_of_block * _MOST_BLOCKS + self.block_numbers
        self.device_gather: DeviceGather | None = None
        if has_kernel(self.device):
            starts = [sample.start for sample in samples]
            self.device_gather = DeviceGather(
                self.block, self.tensor_of_block, self.block_numbers, self._elements, starts, self._orders
            )

    @cached_property
    def rows(self) -> Sequence[Tensor]:
        """The blocks of each sampled tensor, int32: parts of one tensor, since each transfer costs the host."""
        every = from_host(np.concatenate([_EMPTY, *self._chosen]).astype(np.int32), self.device)
        return [every[where] for _, where in self._sampled]

    def _of_one_shape(self, samples: Sequence[TensorSample], parameters: Sequence[Tensor]) -> list[list[int]]:
        """Tensors measured whole, without padding, of which there are many of one shape."""
        found: dict[torch.Size, list[int]] = {}
        for tensor, (sample, parameter) in enumerate(zip(samples, parameters, strict=True)):
            if sample.whole and sample.elements % self.block == 0 < parameter.dim():
                found.setdefault(parameter.shape, []).append(tensor)
        return [members for members in found.values() if len(members) >= _MANY]

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these parameters, of the same samples, lie on the same device and in memory as those it is of."""
        own = [*map(local_part, parameters)]
        return (
            {tensor.device for tensor in own} == {self.device}
            and [*map(_memory_order, own)] == self._orders
            and all(parameters[member].shape == shape for members, _, shape in self._alike for member in members)
            and ({*map(type, parameters)} <= _PLAIN) == self._plain
        )

    def positions_of(self, smaller: BlockLayout, tensors: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Position in this layout of each block of a layout over a smaller sample of the same tensors.

        `tensors` names, for each tensor of `smaller`, its index here; None: they are the same, in the same order.

        Raises:
            ValueError: a block of `smaller` is not among these.
        """
        order = np.argsort(self._keys)
        wanted = smaller._keys
        if tensors is not None:
            wanted = np.asarray(tensors)[wanted // _MOST_BLOCKS] * _MOST_BLOCKS + wanted % _MOST_BLOCKS
        found = np.searchsorted(self._keys, wanted, sorter=order)
        positions = order[np.minimum(found, len(order) - 1)]
        if not np.array_equal(self._keys[positions], wanted):
            raise ValueError("the smaller sample is no part of this one; draw both with the same seed and names")
        return positions

    def same_blocks(
        self, members: Sequence[int], other: BlockLayout, others: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions, in this layout and in the other, of the blocks that are in both.

        `members` and `others` name their tensors. Blocks of different sizes have nothing in common.
        """
        if self.block != other.block:
            return _EMPTY, _EMPTY
        _, here, there = np.intersect1d(
            self._block_names(members), other._block_names(others), assume_unique=True, return_indices=True
        )
        return here, there

    def _block_names(self, members: Sequence[int]) -> NDArray[np.int64]:
        """A number of each block that is its own among all layouts whose tensors `members` names alike."""
        names = np.asarray(members, dtype=np.int64)
        found: NDArray[np.int64] = names[self.host_tensor_of_block] * _MOST_BLOCKS + self.block_numbers
        return found

    def gather(self, tensors: Sequence[Tensor], staging: Staging, *, lasting: bool = True) -> None:
        """Copy the sampled blocks of `tensors` (one each, in the layout's order) into `staging`.

        `lasting`: the same tensors will come again, like weights and states, so their views are kept.
        """
        self.gather_all([Source(tensors, staging, lasting)])

    def gather_all(self, sources: Sequence[Source]) -> None:
        """Fill the stagings of all sources: on a CUDA device by one launch, as far as the tensors allow."""
        filled = self.launch(sources)
        for place, source in enumerate(sources):
            if not (filled and filled[place]):
                self._copy(*source)

    def launch(self, sources: Sequence[Source]) -> list[bool]:
        """Fill stagings by one launch; returns which of them were filled, nothing if there are no kernels here."""
        if self.device_gather is None:
            return []
        return self.device_gather.fill([(source.tensors, source.staging.values) for source in sources])

    def _copy(self, tensors: Sequence[Tensor], staging: Staging, lasting: bool) -> None:
        """Copy the blocks tensor by tensor."""
        views = staging.views
        if lasting and self._plain:
            views.point_at(tensors, self)
            sampled, pieces = views.sampled, views.pieces
        else:
            sampled, pieces = self.views_of(tensors, views.zeros)
        if lasting and views.records:
            for records, chosen, into in zip(views.records, self._chosen, staging.target_records, strict=True):
                records.take(chosen, 0, into, "clip")
        else:
            for rows, blocks, target in zip(self.rows, sampled, staging.targets, strict=True):
                torch.index_select(blocks, 0, rows, out=target)
        for (members, _, _), target in zip(self._alike, staging.alike, strict=True):
            torch.cat([tensors[member] for member in members], out=target)
        if pieces:
            torch.cat(pieces, out=staging.tail)

    def gather_scales(self, scales: Sequence[Tensor]) -> Tensor | None:
        """The scale that each block's elements share with others of BLOCK_ELEMENTS, fp32 [blocks].

        scales: of each tensor, in the order of its elements in memory; None: that is not the order here.
        """
        if not self._simple:
            return None
        return torch.cat([*scales]).index_select(0, self._places_of_scales)

    @cached_property
    def _places_of_scales(self) -> Tensor:
        lengths = np.array([-(-elements // BLOCK_ELEMENTS) for elements in self._elements], dtype=np.int64)
        numbers = self._keys % _MOST_BLOCKS * self.block // BLOCK_ELEMENTS
        first = lengths.cumsum() - lengths
        return from_host(first[self.host_tensor_of_block] + numbers, self.device)

    def whole_squares(self, samples: Sequence[TensorSample], tensors: Sequence[Tensor]) -> Tensor:
        """Σ x² over all of each tensor that is not measured whole, and its largest x²: fp64 [2, tensors], else 0.

        The sum is within 2⁻⁷, the largest is exact. Two passes, no synchronisation. Norms are in the tensors' own
        dtype: on the host, those in fp32 of 16-bit tensors take more than twice as long.
        """
        partly = [index for index, sample in enumerate(samples) if not sample.whole]
        flat = [self._flat(index, tensors[index]) for index in partly]
        norms = torch.stack((*torch._foreach_norm(flat, 2), *max_norms(flat))).view(2, -1)
        squares = norms.to(torch.float64).square_()
        places = from_host(torch.tensor(partly, dtype=torch.int64), self.device)
        return squares.new_zeros(2, len(samples)).index_copy_(1, places, squares)

    def views_of(self, tensors: Sequence[Tensor], zeros: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views [blocks, block] of the tensors that are sampled, and the flat pieces that are taken whole."""
        sampled, pieces = [], []
        for index, _ in self._sampled:
            tensor = tensors[index]
            if self._simple and tensor.is_contiguous() and not tensor.numel() % self.block:
                sampled.append(tensor.view(-1, self.block))
                continue
            flat = self._flat(index, tensor)
            ragged = flat.numel() % self.block
            sampled.append((flat[:-ragged] if ragged else flat).view(-1, self.block))
        fillings: dict[int, Tensor] = {}
        for index, length, missing in self._pieces:
            flat = tensors[index].reshape(-1) if self._simple else self._flat(index, tensors[index])
            pieces.append(flat if flat.numel() == length else flat[-length:])
            if missing:
                filling = fillings.get(missing)
                if filling is None:
                    filling = fillings[missing] = zeros[:missing]
                pieces.append(filling)
        return sampled, pieces

    def _flat(self, index: int, tensor: Tensor) -> Tensor:
        tensor = local_part(tensor)
        order = self._orders[index]
        if order is not None:
            tensor = tensor.permute(order)
        flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)
        part = self._parts[index]
        return flat if part is None else flat[part]


def has_kernel(device: torch.device) -> bool:
    """Whether a kernel may gather samples there; `tests/agent/sample/test_device_gather.py` replaces it."""
    return device.type == "cuda"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _length(sample: TensorSample) -> int:
    """How many elements are copied as one stretch: all, or a ragged tail."""
    return sample.elements if sample.whole else sample.tail * sample.tail_elements


class TensorViews:
    """Views through which a layout gathers tensors of one dtype that come again, as weights and states do.

    `sampled` and `pieces`: see `BlockLayout.views_of`; `copies`: those that share no memory with the tensors. The
    buffers before and after a step share them.
    """

    def __init__(self, layout: BlockLayout, dtype: torch.dtype) -> None:
        self.zeros = torch.zeros(layout.block, dtype=dtype, device=layout.device)
        self.sampled: list[Tensor] = []
        self.pieces: list[Tensor] = []
        self.records: list[NDArray[np.void]] = []
        self.of: list[Tensor] = []
        self.copies: list[Tensor] = []
        self._addresses: list[int] = []

    def point_at(self, tensors: Sequence[Tensor], layout: BlockLayout) -> None:
        """Refer to these tensors; rebuilt only if a tensor or its memory has changed."""
        viewed: list[Tensor] = [tensors[index] for index in layout._viewed]
        addresses = [tensor.data_ptr() for tensor in viewed]
        if addresses == self._addresses and all(map(is_, viewed, self.of)):
            return
        self.sampled, self.pieces = layout.views_of(tensors, self.zeros)
        contiguous = layout.row_major and all(tensor.is_contiguous() for tensor in viewed)
        # A tensor that is not contiguous was copied, not viewed: it must be read again each time.
        self.of, self._addresses = (viewed, addresses) if contiguous else ([], [])
        theirs = set() if contiguous else {_address(local_part(tensor)) for tensor in viewed}
        made = () if contiguous else (*self.sampled, *self.pieces)
        self.copies = [view for view in made if _address(view) not in theirs]
        # A tensor that shrank or changed its dtype: let torch refuse it, because "clip" would read other blocks.
        whole = all(
            blocks.dtype == self.zeros.dtype and len(blocks) > chosen.max(initial=-1)
            for blocks, chosen in zip(self.sampled, layout._chosen, strict=True)
        )
        plain = {type(tensor) for tensor in viewed} <= _PLAIN
        readable = contiguous and self.zeros.is_cpu and plain and whole
        self.records = [_records(blocks) for blocks in self.sampled] if readable else []


class Staging:
    """A flat buffer in the dtype of its values, and the views through which a layout fills it."""

    def __init__(self, layout: BlockLayout, dtype: torch.dtype, views: TensorViews | None = None) -> None:
        """views: of the same tensors, made for another buffer."""
        self.values = torch.zeros(layout.slots, dtype=dtype, device=layout.device)
        self.views = TensorViews(layout, dtype) if views is None else views
        rows = self.values.view(-1, layout.block)
        self.targets = [rows[where] for _, where in layout._sampled]
        self.alike = [self.values[where].view(-1, *shape[1:]) for _, where, shape in layout._alike]
        self.tail = self.values[layout._boundary :]
        records = _records(rows) if self.values.is_cpu else None
        self.target_records = [] if records is None else [records[where] for _, where in layout._sampled]


class Source(NamedTuple):
    """Tensors, one for each of a layout, the buffer for their blocks, and whether the same tensors come again."""

    tensors: Sequence[Any]
    staging: Staging
    lasting: bool


class GatheredSample:
    """The sample of a bucket's weights, states and gradients at one moment: values by key, in buffers made once.

    `values` are flat [slots], in the stored dtypes, or decoded if codes are stored.
    """

    def __init__(self, layout: BlockLayout, composition: Composition) -> None:
        self.values: dict[str, Tensor] = {}
        self._layout = layout
        self._composition = composition
        self._stagings: dict[tuple[str, bool], Staging] = {}
        self._others: Mapping[tuple[str, bool], Staging] = {}

    @classmethod
    def pair(cls, layout: BlockLayout, composition: Composition) -> tuple[GatheredSample, GatheredSample]:
        """Make the samples before and after a step, which share the views of weights and states."""
        before, after = cls(layout, composition), cls(layout, composition)
        before._others, after._others = after._stagings, before._stagings
        return before, after

    def gather(
        self,
        kept: Sequence[KeptState],
        states: Sequence[Mapping[str, Any]],
        *,
        weights: Sequence[Tensor] | None = None,
        gradients: Sequence[Any] | None = None,
    ) -> None:
        """Gather these states as numbers, the registered `weights`, and the `gradients`; None: leave them out.

        Codes that complete a weight are decoded beside it, so the weights were gathered before, or are now.
        """
        sources: list[Source] = []
        coded: dict[str, dict[str, Tensor]] = {}
        if weights is not None:
            self.values[PARAMETER] = self._staged(sources, PARAMETER, weights)
        for entry in kept:
            key = entry.key
            if entry.parts and (parts := self._parts_of(sources, entry, states)) is not None:
                coded[key] = parts
                continue
            tensors = [state[key] if entry.plain else reading(state, key) for state in states]
            self.values[key] = self._staged(sources, key, tensors, lasting=entry.plain)
        if gradients is not None:
            # These tensors do not come again.
            self.values[GRADIENT] = self._staged(sources, GRADIENT, gradients, lasting=False)
        self._layout.gather_all(sources)
        for entry in kept:
            key = entry.key
            if key in coded:
                numbers = decoded(coded[key], key, block=self._layout.block)
                assert numbers is not None, f"the codes of {key!r} are of no known storage"
                self.values[key] = numbers
            if entry.completes:
                self.values[key] = self._composition.residual_of(self.values[PARAMETER], self.values[key])

    def _parts_of(
        self, sources: list[Source], entry: KeptState, states: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor] | None:
        """Codes, to be gathered, and their scales; None if the scales do not match the sample's blocks."""
        found: dict[str, Tensor] = {}
        for part in entry.parts:
            tensors = [state[part] for state in states]
            if not part.endswith(SCALE_SUFFIX):
                found[part] = self._staged(sources, part, tensors, is_code=True)
            elif (scales := self._layout.gather_scales(tensors)) is not None:
                found[part] = scales
            else:
                return None
        return found

    def _staged(
        self,
        sources: list[Source],
        key: str,
        tensors: Sequence[Any],
        *,
        lasting: bool = True,
        is_code: bool = False,
    ) -> Tensor:
        """The buffer that the tensors' blocks will be in, once `sources`, which this adds to, are gathered."""
        name, dtype = (key, is_code), tensors[0].dtype
        staging = self._stagings.get(name)
        if staging is None or staging.values.dtype != dtype:
            known = self._others.get(name)
            shared = known.views if known is not None and known.values.dtype == dtype else None
            staging = self._stagings[name] = Staging(self._layout, dtype, shared)
        sources.append(Source(tensors, staging, lasting))
        return staging.values


def _records(blocks: Tensor) -> NDArray[np.void]:
    """The same memory as one record a block, of which NumPy gathers a few at half the cost of torch.

    Through DLPack: `Tensor.numpy()` would forbid the training to resize the storage.
    """
    record = np.dtype((np.void, blocks.shape[1] * blocks.element_size()))
    array: NDArray[np.void] = np.from_dlpack(blocks.detach().view(torch.uint8)).view(record)[:, 0]
    return array


def _memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """Axes from the slowest to the fastest, None for row-major, so that blocks are contiguous in memory."""
    if parameter.is_contiguous():
        return None
    strides = parameter.stride()
    return tuple(sorted(range(parameter.dim()), key=lambda axis: -strides[axis]))
