"""Gathering the sampled blocks of many tensors into one flat buffer, a few calls for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from collage_agent.sample.sampling import TensorSample

__all__ = ["BlockLayout", "Staging", "local"]

_EMPTY: Final = np.empty(0, dtype=np.int64)
_MOST_BLOCKS: Final = 2**40


def local(tensor: Tensor) -> Tensor:
    """The shard of a distributed tensor that lives on this rank; any other tensor as it is."""
    if type(tensor) in (Tensor, Parameter):
        return tensor
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _largest_magnitudes(tensors: list[Tensor]) -> Sequence[Tensor]:
    if not tensors[0].is_cpu:
        return torch._foreach_norm(tensors, inf)
    # On the host that norm takes twenty times as long.
    return [torch.stack(torch.aminmax(tensor)).abs_().amax() for tensor in tensors]


class BlockLayout:
    """Where the sampled blocks of several tensors lie in a flat buffer of `slots` = blocks · block elements.

    First the full blocks of the sampled tensors, by `index_select`; behind them the tensors measured whole and
    the ragged tails, by one `cat`, each padded to whole blocks with zeros.
    `columns` [blocks] int64 names the tensor that each block belongs to, `host_columns` is the same on the host;
    `padding` lists the padded slots.
    """

    def __init__(self, samples: Sequence[TensorSample], parameters: Sequence[Tensor]) -> None:
        self.block = samples[0].block
        self.device = local(parameters[0]).device
        self._orders = [_memory_order(local(parameter)) for parameter in parameters]
        self._parts = [
            None if sample.start is None else slice(sample.start, sample.start + sample.elements)
            for sample in samples
        ]
        self._plain = all(type(parameter) in (Tensor, Parameter) for parameter in parameters)
        self._sampled: list[tuple[int, Tensor, slice]] = []
        self._pieces: list[tuple[int, int, int]] = []
        columns, numbers = [_EMPTY], [_EMPTY]
        padding: list[int] = []
        count = 0
        for tensor, sample in enumerate(samples):
            if not sample.whole and len(sample.rows):
                rows = torch.from_numpy(sample.rows.astype(np.int32)).to(self.device)
                self._sampled.append((tensor, rows, slice(count, count + len(rows))))
                columns.append(np.full(len(rows), tensor))
                numbers.append(sample.rows)
                count += len(rows)
        self._boundary = count * self.block
        for tensor, sample in enumerate(samples):
            length = sample.elements if sample.whole else sample.tail * sample.tail_elements
            if length:
                blocks = -(-length // self.block)
                missing = blocks * self.block - length
                self._pieces.append((tensor, length, missing))
                columns.append(np.full(blocks, tensor))
                numbers.append(np.arange(sample.population_blocks - blocks, sample.population_blocks))
                count += blocks
                padding += range(count * self.block - missing, count * self.block)
        self._chosen = [samples[tensor].rows.astype(np.intp) for tensor, _, _ in self._sampled]
        self.blocks = count
        self.slots = count * self.block
        self.host_columns = np.concatenate(columns)
        self.columns = torch.from_numpy(self.host_columns).to(self.device)
        self.padding = padding
        self._keys = self.host_columns * _MOST_BLOCKS + np.concatenate(numbers)

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

    def gather(self, tensors: Sequence[Tensor], staging: Staging, *, lasting: bool = True) -> None:
        """Copy the sampled blocks of `tensors` (one each, in the layout's order) into `staging`.

        `lasting` says that the same tensors will come again, as weights and states do: views of them are kept.
        """
        if lasting and self._plain:
            staging.keep_views_of(tensors, self)
            sampled, pieces = staging.views
        else:
            sampled, pieces = self.views_of(tensors, staging.zeros)
        if lasting and staging.records:
            for records, chosen, into in zip(staging.records, self._chosen, staging.target_records, strict=True):
                records.take(chosen, 0, into, "clip")
        else:
            for (_, rows, _), blocks, target in zip(self._sampled, sampled, staging.targets, strict=True):
                torch.index_select(blocks, 0, rows, out=target)
        if pieces:
            torch.cat(pieces, out=staging.tail)

    def whole_squares(self, samples: Sequence[TensorSample], tensors: Sequence[Tensor]) -> Tensor:
        """Σ x² over all of each tensor that is not measured whole, and its largest x²: fp64 [2, tensors], else 0.

        The sum is within 2⁻⁷, the largest is exact. Two passes, no synchronisation. Norms are in the tensors' own
        dtype: on the host, those in fp32 of 16-bit tensors take more than twice as long.
        """
        partly = [index for index, sample in enumerate(samples) if not sample.whole]
        flat = [self._flat(index, tensors[index]) for index in partly]
        pairs = zip(torch._foreach_norm(flat, 2), _largest_magnitudes(flat), strict=True)
        norms = [torch.stack(pair) for pair in pairs]
        of_tensor = dict(zip(partly, norms, strict=True))
        none = torch.zeros_like(norms[0])
        rows = torch.stack([of_tensor.get(index, none) for index in range(len(samples))], dim=1)
        return rows.to(torch.float64).square_()

    def views_of(self, tensors: Sequence[Tensor], zeros: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views [blocks, block] of the tensors that are sampled, and the flat pieces that are taken whole."""
        sampled, pieces = [], []
        for index, _, _ in self._sampled:
            tensor = tensors[index]
            simple = self._plain and self._orders[index] is None and self._parts[index] is None
            if simple and tensor.is_contiguous() and not tensor.numel() % self.block:
                sampled.append(tensor.view(-1, self.block))
                continue
            flat = self._flat(index, tensor)
            ragged = flat.numel() % self.block
            sampled.append((flat[:-ragged] if ragged else flat).view(-1, self.block))
        for index, length, missing in self._pieces:
            flat = self._flat(index, tensors[index])
            pieces.append(flat if flat.numel() == length else flat[-length:])
            if missing:
                pieces.append(zeros[:missing])
        return sampled, pieces

    def _flat(self, index: int, tensor: Tensor) -> Tensor:
        tensor = local(tensor)
        order = self._orders[index]
        if order is not None:
            tensor = tensor.permute(order)
        flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)
        part = self._parts[index]
        return flat if part is None else flat[part]


class Staging:
    """A flat buffer in the dtype of what it holds, with the views that a layout fills it from and through."""

    def __init__(self, layout: BlockLayout, dtype: torch.dtype) -> None:
        self.values = torch.zeros(layout.slots, dtype=dtype, device=layout.device)
        self.zeros = torch.zeros(layout.block, dtype=dtype, device=layout.device)
        rows = self.values.view(-1, layout.block)
        self.targets = [rows[where] for _, _, where in layout._sampled]
        self.tail = self.values[layout._boundary :]
        self.views: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.records: list[NDArray[np.void]] = []
        self.target_records = [_records(target) for target in self.targets] if self.values.is_cpu else []
        self._sources: list[tuple[Tensor, int]] = []

    def keep_views_of(self, tensors: Sequence[Tensor], layout: BlockLayout) -> None:
        """Have `views` show these tensors, made anew only if a tensor or its memory is another than last time."""
        known = self._sources
        if len(known) == len(tensors) and all(
            tensor is source and tensor.data_ptr() == address
            for tensor, (source, address) in zip(tensors, known, strict=True)
        ):
            return
        self.views = layout.views_of(tensors, self.zeros)
        contiguous = all(order is None for order in layout._orders) and all(
            tensor.is_contiguous() for tensor in tensors
        )
        # A tensor that is not contiguous was copied, not viewed: it must be read again each time.
        self._sources = [(tensor, tensor.data_ptr()) for tensor in tensors] if contiguous else []
        readable = (
            contiguous and self.values.is_cpu and all(type(tensor) in (Tensor, Parameter) for tensor in tensors)
        )
        self.records = [_records(blocks) for blocks in self.views[0]] if readable else []


def _records(blocks: Tensor) -> NDArray[np.void]:
    """The same memory as one record a block, of which NumPy gathers a few at half the cost of torch.

    Through DLPack: `Tensor.numpy()` would forbid the training to resize the storage.
    """
    record = np.dtype((np.void, blocks.shape[1] * blocks.element_size()))
    array: NDArray[np.void] = np.from_dlpack(blocks.detach().view(torch.uint8)).view(record)[:, 0]
    return array


def _memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """Axes from the slowest to the fastest, None for row-major: blocks then lie together in memory."""
    if parameter.is_contiguous():
        return None
    strides = parameter.stride()
    return tuple(sorted(range(parameter.dim()), key=lambda axis: -strides[axis]))
