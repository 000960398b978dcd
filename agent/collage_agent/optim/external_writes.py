"""Writes to a weight by somebody else: what is kept beside the weight is dropped before it can undo them.

Between two steps others write to weights: an average is swapped in and out, a head is made anew, an adapter is
merged, weights are pruned. A residual or a master weight belongs to the bits that a step left. Where these are
others now, they are the weight, and what was kept beside the old ones goes. Elsewhere it stays, so that a swap and
its restore change nothing.

A step remembers of each weight: its version, which a write in place raises, its address, and the bits of a few
runs of its elements, which show a write through `.data`. Where one of these has changed, elements are compared:

- A master weight must round to the weight: exact for each element.
- The bits beside which a residual was left are not kept, they would cost two bytes a weight. If a sampled element
  has changed, the residual of the whole weight goes, otherwise that of elements for which it is too large: above
  half a gap. A weight that is found changed twice gets a copy of the bits from then on; that again is exact.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_agent.numerics.formats import format_of
from collage_agent.optim.guards import DeferredReads
from collage_agent.optim.strategies import MASTER_PARAMETER, StorageStrategy

__all__ = ["ON_EXTERNAL_WRITE", "ExternalWrites", "KeptWeight"]

ON_EXTERNAL_WRITE = ("adopt", "raise")

_LOGGER = logging.getLogger(__name__)
_RUNS, _RUN_ELEMENTS = 4, 64
_SMALL_ELEMENTS = 1 << 14
_WRITES_BEFORE_COPY = 2


@dataclass(slots=True)
class KeptWeight:
    """A weight that takes a step, and the tensor `kept` beside it, as far as they live here.

    largest: the largest residual that a step leaves, in gaps of the weight; 0 where none is kept as a float.
    sampled: how many of its elements are in the sample.
    """

    parameter: Tensor
    strategy: StorageStrategy
    raises: bool
    largest: float
    weight: Tensor
    kept: Tensor
    sampled: int = 0

    def version(self) -> tuple[int, int]:
        """Changes with every write in place to the weight, and with its memory; `.data` hides a write from it."""
        parameter, weight = self.parameter, self.weight
        own = parameter._version
        return own if parameter is weight else own + weight._version, weight.data_ptr()


@dataclass(slots=True)
class _Left:
    """What the last step left of a weight. `joined` int16: the samples of several; `copy`: all of its bits."""

    version: tuple[int, int]
    kept_version: int
    joined: Tensor
    offset: int
    length: int
    writes: int = 0
    copy: Tensor | None = None

    def sample(self) -> Tensor:
        return self.joined[self.offset : self.offset + self.length]


class ExternalWrites:
    """What one optimizer remembers of its weights between two steps, and how often somebody else wrote to them."""

    def __init__(self) -> None:
        self.count = 0
        self._told = False
        self._left: dict[Tensor, _Left] = {}
        self._runs: list[tuple[list[KeptWeight], list[Tensor]]] = []
        self._reads = DeferredReads()

    def forget(self) -> None:
        """Weights and states come from elsewhere: only what contradicts itself is taken for a write."""
        self._left.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def adopt(self, weights: Sequence[KeptWeight], name_of: Callable[[Tensor], str]) -> None:
        """Drop what is kept beside weights that somebody else changed since `remember`.

        Raises RuntimeError for the first such weight that is to `raise`, before anything is changed. Nothing waits
        for a device, except to raise there after a write in place. On a device a write through `.data` is told, too
        late to be saved.
        """
        self._reads.poll()
        self._runs = _sample_runs(weights)
        found: list[tuple[KeptWeight, Tensor]] = []
        for members, runs in self._runs:
            moved = [self._has_moved(entry) for entry in members]
            on_host = reads_at_once(members[0].weight.device)
            differing = self._differing(members, _joined(runs), moved, on_host)
            for entry, suspect, differs in zip(members, moved, differing, strict=True):
                if suspect or differs is True:
                    mask = self._changed_elements(entry, differs)
                    if not (on_host or entry.raises) or mask.any():
                        found.append((entry, mask))
        for entry, _ in found:
            if entry.raises:
                raise RuntimeError(
                    f"somebody else wrote to {name_of(entry.parameter)} since the last step, and "
                    "on_external_write='raise'; no weight was stepped. Write before the first step, or pass 'adopt'"
                )
        for entry, mask in found:
            _drop(entry, mask)
            self._reads.add(mask.any(), functools.partial(self._count, entry, name_of))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def remember(self) -> None:
        """After the step: what it left of the weights that `adopt` was given. No synchronisation."""
        for members, runs in self._runs:
            joined, offset = _joined(runs), 0
            for entry in members:
                parameter = entry.parameter
                left = self._left.get(parameter)
                if left is None:
                    left = self._left[parameter] = _Left((0, 0), 0, joined, 0, 0)
                left.version, left.kept_version = entry.version(), entry.kept._version
                left.joined, left.offset, left.length = joined, offset, entry.sampled
                offset += entry.sampled
                if left.writes >= _WRITES_BEFORE_COPY:
                    if left.copy is None:
                        left.copy = torch.empty_like(entry.weight, memory_format=torch.preserve_format)
                    left.copy.copy_(entry.weight)
        # Views would keep the memory of weights that are moved elsewhere.
        self._runs = []

    def _has_moved(self, entry: KeptWeight) -> bool:
        left = self._left.get(entry.parameter)
        return left is None or left.version != entry.version()

    def _differing(
        self, members: list[KeptWeight], now: Tensor, moved: list[bool], on_host: bool
    ) -> list[bool | Tensor]:
        """For each weight whether its sample has other bits; on a device a tensor, and only where it has moved."""
        lefts = [self._left.get(entry.parameter) for entry in members]
        then = lefts[0].joined if lefts[0] is not None else None
        offset, together = 0, then is not None and len(then) == len(now)
        for left in lefts:
            if left is None or left.joined is not then or left.offset != offset:
                together = False
                break
            offset += left.length
        if together and then is not None:
            if on_host and torch.equal(now, then):
                return [False] * len(members)
            if not on_host and not any(moved):
                self._reads.add(now.ne(then).any(), self._tell_too_late)
                return [False] * len(members)
        found: list[bool | Tensor] = []
        offset = 0
        for entry, left, suspect in zip(members, lefts, moved, strict=True):
            sample = now[offset : offset + entry.sampled]
            offset += entry.sampled
            # A state that was written to as well is a checkpoint, loaded in place: weight and state agree.
            if left is None or left.length != entry.sampled or left.kept_version != entry.kept._version:
                found.append(False)
            elif on_host:
                found.append(not torch.equal(sample, left.sample()))
            else:
                found.append(sample.ne(left.sample()).any() if suspect else False)
        return found

    def _changed_elements(self, entry: KeptWeight, differs: bool | Tensor) -> Tensor:
        """Bool tensor of the weight's shape: where somebody else wrote."""
        weight, kept = entry.weight, entry.kept
        left = self._left.get(entry.parameter)
        if entry.strategy.parameter_state == MASTER_PARAMETER and not entry.strategy.stochastic:
            changed = _rounds_elsewhere(kept, weight)
            if left is None:
                # A loaded master may lie halfway between its weight and the next one, which to even is the other.
                changed &= _rounds_elsewhere(torch.nextafter(kept, weight.to(kept.dtype)), weight)
            return changed
        if left is not None and left.copy is not None and left.kept_version == kept._version:
            return weight.view(torch.int16).ne(left.copy.view(torch.int16))
        return _too_large(entry).logical_or_(torch.as_tensor(differs, device=weight.device))

    def _count(self, entry: KeptWeight, name_of: Callable[[Tensor], str], changed: Tensor) -> None:
        if not changed:
            return
        self.count += 1
        left = self._left.get(entry.parameter)
        if left is not None:
            left.writes += 1
        if not self._told:
            self._told = True
            _LOGGER.warning(
                "low precision: somebody else wrote to %s since the last step: strategy %r takes the new weights "
                "and drops what it kept beside the old ones. Said once; `external_writes` counts, "
                "on_external_write='raise' shows who writes",
                name_of(entry.parameter),
                entry.strategy.name,
            )

    def _tell_too_late(self, changed: Tensor) -> None:
        if changed and not self._told:
            self._told = True
            _LOGGER.warning(
                "low precision: somebody else wrote to weights through .data, which on a device is seen only after "
                "the step has undone it: write in place under torch.no_grad() instead"
            )


def reads_at_once(device: torch.device) -> bool:
    """Whether a value can be read without waiting for a device."""
    return device.type == "cpu"


def _sample_runs(weights: Sequence[KeptWeight]) -> list[tuple[list[KeptWeight], list[Tensor]]]:
    """By dtype and device: the weights, and in the same order views of a few runs of each one's elements."""
    found: dict[tuple[torch.dtype, torch.device], tuple[list[KeptWeight], list[Tensor]]] = {}
    members: list[KeptWeight] = []
    runs: list[Tensor] = []
    dtype = device = None
    for entry in weights:
        weight = entry.weight
        if weight.dtype != dtype or weight.device != device:
            dtype, device = weight.dtype, weight.device
            members, runs = found.setdefault((dtype, device), ([], []))
        members.append(entry)
        if not _is_dense(weight):
            runs.append(weight.as_strided((0,), (1,)))
            continue
        elements, start = weight.numel(), weight.storage_offset()
        if elements < _SMALL_ELEMENTS:
            entry.sampled = min(elements, _RUN_ELEMENTS)
            runs.append(weight.as_strided((entry.sampled,), (1,), start + (elements - entry.sampled) // 2))
        else:
            entry.sampled, apart = _RUNS * _RUN_ELEMENTS, elements // _RUNS
            first = start + (apart - _RUN_ELEMENTS) // 2
            runs += weight.as_strided((_RUNS, _RUN_ELEMENTS), (apart, 1), first).unbind()
    return list(found.values())


def _is_dense(weight: Tensor) -> bool:
    """Whether the weight's elements lie without gaps from its first one on, in whatever order."""
    if weight.is_contiguous():
        return True
    spans = ((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return 1 + sum(spans) == weight.numel()


def _joined(runs: Sequence[Tensor]) -> Tensor:
    """The runs' bits as one int16 vector."""
    return torch.cat(tuple(runs)).view(torch.int16)


def _rounds_elsewhere(kept: Tensor, weight: Tensor) -> Tensor:
    """Where a master weight does not round to the weight; a NaN rounds to a NaN."""
    rounded = kept.to(weight.dtype)
    return rounded.ne(weight).logical_and_(rounded.isnan().logical_and_(weight.isnan()).logical_not_())


def _too_large(entry: KeptWeight) -> Tensor:
    """Where a residual is more than a step leaves beside this weight.

    Bits below a weight are never more than half a gap, but below a zero there are none: they would make it a NaN.
    The gap is that away from zero, 2^(e - 7) in bfloat16: from a power of two towards zero it is half as wide.
    """
    weight, kept = entry.weight, entry.kept
    if not kept.dtype.is_floating_point:
        return weight.eq(0).logical_and_(kept.ne(0))
    if not entry.largest:
        return torch.zeros_like(weight, dtype=torch.bool)
    layout = format_of(weight.dtype)
    exponent = ((1 << layout.exponent_bits) - 1) << layout.mantissa_bits
    power = weight.view(torch.int16).bitwise_and(exponent).view(weight.dtype).to(torch.float32)
    return kept.to(torch.float32).abs_().gt(power.mul_(entry.largest * 2.0**-layout.mantissa_bits))


def _drop(entry: KeptWeight, written: Tensor) -> None:
    """Make the weight's own value the whole of it where it was written."""
    if entry.strategy.parameter_state == MASTER_PARAMETER:
        entry.kept.copy_(torch.where(written, entry.weight.to(entry.kept.dtype), entry.kept))
    else:
        entry.kept.masked_fill_(written, 0)
