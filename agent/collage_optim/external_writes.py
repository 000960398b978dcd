"""External writes to a weight: its residual or master weight is dropped before it can undo the write.

Between two steps other code writes to weights: it swaps an average in and out, replaces a head, merges an adapter,
prunes. A residual or a master weight belongs to the bits that a step left. If the bits have changed, the new ones
are the weight, and the parts beside the old ones are dropped. Where they have not, the parts stay, so that a swap
and its restore change nothing.

A step remembers of each weight: its version, which a write in place raises, where its elements lie, and the bits
of a few stretches of them, which show a write through `.data`. Where one of these has changed, elements are
compared:

- A master weight must round to the weight: exact for each element.
- The bits of a weight with a residual are not copied, because that would cost two bytes a weight. If a sampled
  element has changed, or the elements lie in another order, the whole residual is dropped; otherwise only where it
  is above half a gap. A weight that is found changed twice gets a copy of its bits from then on: that is exact.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collage_optim.from_host import reads_at_once
from collage_optim.numerics.formats import format_of
from collage_optim.range_guards import DeferredReads
from collage_optim.strategies import MASTER_PARAMETER, StateStorage, StorageStrategy, strategy_named
from collage_optim.tensor_step import Member, local_part

__all__ = ["ExternalWrites", "ON_EXTERNAL_WRITE"]

ON_EXTERNAL_WRITE = ("adopt", "raise")

_LOGGER = logging.getLogger(__name__)
_STRETCHES, _STRETCH_ELEMENTS = 4, 64
_SMALL_ELEMENTS = 1 << 14
_WRITES_BEFORE_COPY = 2
_NEVER_STEPPED = -1
_version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
_Place = tuple[int, tuple[int, ...]]
"""A weight's place in memory: the address of its first element, and the strides."""
_NOWHERE: _Place = (0, ())


@dataclass(slots=True, eq=False)
class _TrackedWeight:
    """The memory about a weight that has a residual or a master weight.

    version, place, state_version: as the last step left them; a write in place raises a version.
    stretches: some of the elements at `place`; their bits are in the sample, from `offset` on.
    copy: the bits of all elements.
    """

    parameter: Tensor
    version: int = _NEVER_STEPPED
    place: _Place = _NOWHERE
    state_version: int = 0
    stretches: list[memoryview] | None = None
    sample: _Sample | None = None
    offset: int = 0
    writes: int = 0
    copy: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    """A weight that takes a step, as far as it lives here. For the step only: later it would keep memory alive."""

    tracked: _TrackedWeight
    strategy: StorageStrategy
    group: Mapping[str, Any]
    weight: Tensor
    state: Tensor
    reordered: bool = False

    def version(self) -> int:
        parameter, weight = self.tracked.parameter, self.weight
        return parameter._version if weight is parameter else parameter._version + weight._version


_Places = tuple[list[int], list[int], list[tuple[int, ...]]]
"""Of weights: which objects they are, their addresses and their strides."""


@dataclass(slots=True, eq=False)
class _Sample:
    """Stretches that are read together: weights of one dtype and device; on a device, also of one length.

    places: of the weights among those that take the step. sizes: elements of each weight's stretches. memory, on
    a host, or views, on a device: the stretches. left: their bits, as the last step left them. lasting: whether the
    views are by address, so that they may be kept.
    """

    on_host: bool
    lasting: bool
    places: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    memory: list[memoryview] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    left: bytearray | Tensor | None = None

    def read(self) -> bytearray | Tensor:
        """The present bits, on a host as bytes: a twentieth of what torch.cat takes."""
        return bytearray().join(self.memory) if self.on_host else torch.cat(self.views)


class ExternalWrites:
    """The memory of one optimizer about its weights between two steps, and the number of external writes."""

    def __init__(self) -> None:
        self.count = 0
        self._told = self._stopped = False
        self._tracked: dict[Tensor, _TrackedWeight] = {}
        self._entries: list[_Entry] = []
        self._order: list[_TrackedWeight] = []
        self._samples: list[_Sample] = []
        self._places: _Places | None = None
        self._versions: tuple[list[int], list[int]] = [], []
        self._seen: tuple[list[Tensor], list[Tensor]] | None = None
        self._reads = DeferredReads()

    def stop(self) -> None:
        """Look no more: a CUDA graph takes the steps, which no host sees, nor what its replays write."""
        self.forget()
        self._stopped = True

    def forget(self) -> None:
        """Note that weights and states were loaded: only contradictions between them count as a write."""
        self._tracked.clear()
        self._order, self._samples, self._places = [], [], None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def adopt(
        self, groups: Iterable[tuple[Mapping[str, Any], Sequence[Member]]], name_of: Callable[[Tensor], str]
    ) -> None:
        """Drop the parts beside weights that were changed externally since `remember`.

        groups: each with its members that take a step. Raises RuntimeError for the first such weight of a group
        with `raise`, before anything is changed. Nothing waits for a device, except to raise after a write in place
        there. A write through `.data` on a device is reported, but too late to be saved.
        """
        if self._stopped:
            return
        self._reads.poll()
        groups = list(groups)
        if self._looks_untouched(groups):
            return
        self._entries = self._entries_of(groups)
        found: list[tuple[_Entry, Tensor]] = []
        for entry, differs in self._suspects(self._moved()):
            mask = self._changed_elements(entry, differs)
            waits = reads_at_once(entry.weight.device) or entry.group["on_external_write"] == "raise"
            if not waits or mask.any():
                found.append((entry, mask))
        for entry, _ in found:
            if entry.group["on_external_write"] == "raise":
                raise RuntimeError(
                    f"somebody else wrote to {name_of(entry.tracked.parameter)} since the last step, and "
                    "on_external_write='raise'; no weight was stepped. Write before the first step, or pass 'adopt'"
                )
        for entry, mask in found:
            _drop(entry, mask)
            self._reads.add(mask.any(), functools.partial(self._count, entry.tracked, entry.strategy, name_of))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def remember(self) -> None:
        """After the step: the state of the weights that were passed to `adopt`. No synchronisation."""
        if self._stopped:
            return
        if self._seen is not None:
            self._versions = _versions(self._seen[0]), _versions(self._seen[1])
            self._seen = None
            for sample in self._samples:
                sample.left = sample.read()
            return
        for sample in self._samples:
            if sample.left is None:
                offset = 0
                for place, elements in zip(sample.places, sample.sizes, strict=True):
                    tracked = self._entries[place].tracked
                    tracked.sample, tracked.offset = sample, offset
                    offset += elements
            sample.left = sample.read()
            if not sample.lasting:
                sample.views = []
        for entry in self._entries:
            tracked = entry.tracked
            tracked.version, tracked.state_version = entry.version(), entry.state._version
            if tracked.writes >= _WRITES_BEFORE_COPY:
                if tracked.copy is None:
                    tracked.copy = torch.empty_like(entry.weight, memory_format=torch.preserve_format)
                tracked.copy.copy_(entry.weight)
        entries, self._entries = self._entries, []
        simple = all(sample.lasting for sample in self._samples) and all(
            entry.weight is entry.tracked.parameter and entry.tracked.copy is None for entry in entries
        )
        weights, states = [entry.weight for entry in entries], [entry.state for entry in entries]
        self._places = _places(weights) if simple and weights else None
        self._versions = _versions(weights), _versions(states)

    def _looks_untouched(self, groups: Sequence[tuple[Mapping[str, Any], Sequence[Member]]]) -> bool:
        """Whether the weights are the last step's, and unchanged as far as the host can see.

        So it is at nearly every step. The records of single weights then stay as they are, which halves the cost.
        """
        self._seen = None
        if self._places is None:
            return False
        parameters: list[Tensor] = []
        states: list[Tensor] = []
        for group, members in groups:
            key = strategy_named(group["strategy"]).parameter_state
            if key is not None:
                parameters += [member.parameter for member in members]
                states += [member.state[key] for member in members]
        if (
            _versions(parameters) == self._versions[0]
            and _places(parameters) == self._places
            and all(sample.read() == sample.left for sample in self._samples if sample.on_host)
        ):
            self._seen = parameters, states
            for sample in self._samples:
                if not sample.on_host:
                    self._compare_later(sample.read(), sample.left)
            return True
        for tracked, version, state_version in zip(self._order, *self._versions, strict=True):
            tracked.version, tracked.state_version = version, state_version
        self._places = None
        return False

    def _entries_of(self, groups: Iterable[tuple[Mapping[str, Any], Sequence[Member]]]) -> list[_Entry]:
        """The weights with a residual or master value."""
        found: list[_Entry] = []
        for group, members in groups:
            strategy = strategy_named(group["strategy"])
            key = strategy.parameter_state
            if key is None:
                continue
            for member in members:
                parameter, state = member.parameter, member.state[key]
                tracked = self._tracked.get(parameter)
                if tracked is None:
                    tracked = self._tracked[parameter] = _TrackedWeight(parameter)
                weight = parameter
                if type(parameter) is not torch.nn.Parameter:
                    weight, state = local_part(parameter.detach()), local_part(state)
                found.append(_Entry(tracked, strategy, group, weight, state))
        return found

    def _moved(self) -> list[bool]:
        """For each weight whether its version or its memory is another one than the last step left."""
        moved, relocated = [], False
        for entry in self._entries:
            tracked, weight = entry.tracked, entry.weight
            place = weight.data_ptr(), weight.stride()
            elsewhere = place != tracked.place
            moved.append(elsewhere or entry.version() != tracked.version)
            if elsewhere:
                if place[1] != tracked.place[1]:
                    # Stretches are read in memory order, which has changed: the old bits belong to other elements.
                    tracked.sample = None
                    entry.reordered = tracked.place is not _NOWHERE
                tracked.place, tracked.stretches, relocated = place, None, True
        order = [entry.tracked for entry in self._entries]
        if relocated or order != self._order:
            self._order, self._samples = order, _samples_of(self._entries)
        return moved

    def _suspects(self, moved: list[bool]) -> Iterator[tuple[_Entry, bool | Tensor]]:
        """The weights that may have been written to, each with whether its sampled bits have changed.

        On a device that is a tensor, and said only of weights that have moved.
        """
        for sample in self._samples:
            entries = [self._entries[place] for place in sample.places]
            if not sample.on_host and not sample.views:
                sample.views = [_stretches_within(entry.weight) for entry in entries]
            suspects = [moved[place] for place in sample.places]
            now, left = sample.read(), sample.left
            if sample.on_host and now == left:
                yield from ((entry, False) for entry, suspect in zip(entries, suspects, strict=True) if suspect)
                continue
            if left is not None and not sample.on_host and not any(suspects):
                self._compare_later(now, left)
                continue
            parts = torch.split(_integers(now), sample.sizes)
            for entry, suspect, own in zip(entries, suspects, parts, strict=True):
                differs = _differs(entry, own) if suspect or sample.on_host else False
                if suspect or differs is True:
                    yield entry, differs

    def _changed_elements(self, entry: _Entry, differs: bool | Tensor) -> Tensor:
        """Bool tensor of the weight's shape: true where an external write changed it."""
        tracked, weight, state = entry.tracked, entry.weight, entry.state
        if entry.strategy.parameter_state == MASTER_PARAMETER and not entry.strategy.stochastic:
            changed = _rounds_elsewhere(state, weight)
            if tracked.version == _NEVER_STEPPED:
                # A loaded master may be a tie between its weight and a neighbour, to which it would round.
                changed &= _rounds_elsewhere(torch.nextafter(state, weight.to(state.dtype)), weight)
            return changed
        if tracked.copy is not None and tracked.state_version == state._version:
            return weight.view(torch.int16).ne(tracked.copy.view(torch.int16))
        return _too_large(entry).logical_or_(torch.as_tensor(differs, device=weight.device))

    def _count(
        self,
        tracked: _TrackedWeight,
        strategy: StorageStrategy,
        name_of: Callable[[Tensor], str],
        changed: Tensor,
    ) -> None:
        if not changed:
            return
        self.count += 1
        tracked.writes += 1
        if not self._told:
            self._told = True
            _LOGGER.warning(
                "low precision: somebody else wrote to %s since the last step: strategy %r takes the new weights "
                "and drops what it kept beside the old ones. Said once; `external_writes` counts, "
                "on_external_write='raise' shows who writes",
                name_of(tracked.parameter),
                strategy.name,
            )

    def _compare_later(self, now: bytearray | Tensor, left: bytearray | Tensor | None) -> None:
        """Tell of bits that differ when the device has compared them."""
        if left is not None:
            self._reads.add(_integers(now).ne(_integers(left)).any(), self._tell_too_late)

    def _tell_too_late(self, changed: Tensor) -> None:
        if changed and not self._told:
            self._told = True
            _LOGGER.warning(
                "low precision: somebody else wrote to weights through .data, which on a device is seen only after "
                "the step has undone it: write in place under torch.no_grad() instead"
            )


def _places(weights: Sequence[Tensor]) -> _Places:
    return list(map(id, weights)), list(map(Tensor.data_ptr, weights)), list(map(Tensor.stride, weights))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(_version_of, tensors))


def _integers(bits: bytearray | Tensor) -> Tensor:
    """What `_Sample.read` returned, as int16 [elements]."""
    if isinstance(bits, Tensor):
        return bits.view(-1).view(torch.int16)
    return torch.frombuffer(bits, dtype=torch.int16) if bits else torch.empty(0, dtype=torch.int16)


def _samples_of(entries: Sequence[_Entry]) -> list[_Sample]:
    """The weights' stretches, as they are read together. On a host they last until a weight's memory is another."""
    found: dict[tuple[torch.device, torch.dtype, int], _Sample] = {}
    for place, entry in enumerate(entries):
        tracked, weight = entry.tracked, entry.weight
        on_host = reads_at_once(weight.device)
        (stretches, elements), _, _ = _stretch_layout(weight)
        lasting = on_host or _views_by_address(weight.device)
        key = weight.device, weight.dtype, 0 if on_host else elements
        sample = found.setdefault(key, _Sample(on_host, lasting))
        sample.places.append(place)
        sample.sizes.append(stretches * elements)
        if on_host:
            tracked.stretches = _stretches_at(weight) if tracked.stretches is None else tracked.stretches
            sample.memory += tracked.stretches
        else:
            sample.views.append(_stretches_by_address(weight) if lasting else _stretches_within(weight))
    return list(found.values())


def _stretch_layout(weight: Tensor) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Shape, strides and first element of each contiguous stretch of a weight."""
    elements = weight.numel()
    if not elements or not _is_dense(weight):
        return (0, 1), (1, 1), 0
    if elements < _SMALL_ELEMENTS:
        length = min(elements, _STRETCH_ELEMENTS)
        return (1, length), (length, 1), (elements - length) // 2
    apart = elements // _STRETCHES
    return (_STRETCHES, _STRETCH_ELEMENTS), (apart, 1), (apart - _STRETCH_ELEMENTS) // 2


def _stretches_within(weight: Tensor) -> Tensor:
    """A view of the weight's stretches [stretches, elements a stretch]."""
    shape, strides, first = _stretch_layout(weight)
    return weight.as_strided(shape, strides, weight.storage_offset() + first)


def _stretches_at(weight: Tensor) -> list[memoryview]:
    """The same by address: they keep no memory alive, and are to be read only while the weight is there.

    So they last from step to step; views would have to be made for each.
    """
    (stretches, elements), (apart, _), first = _stretch_layout(weight)
    memory, width = ctypes.c_char * (elements * weight.element_size()), weight.element_size()
    address = weight.data_ptr() + first * width
    return [memoryview(memory.from_address(address + stretch * apart * width)) for stretch in range(stretches)]


def _stretches_by_address(weight: Tensor) -> Tensor:
    """The view of `_stretches_within` by address, made as torch makes those of its CUDA graphs."""
    shape, strides, first = _stretch_layout(weight)
    width, elements = weight.element_size(), 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    storage = torch._C._construct_storage_from_data_pointer(
        weight.data_ptr() + first * width, weight.device, elements * width
    )
    return torch.empty(0, dtype=weight.dtype, device=weight.device).set_(storage, 0, shape, strides)


@functools.lru_cache
def _views_by_address(device: torch.device) -> bool:
    """Whether they can be had there; waits once. Not every device's addresses are numbers of bytes."""
    if device.type not in ("cpu", "cuda"):
        return False
    probe = torch.arange(2 * _STRETCH_ELEMENTS, dtype=torch.int16, device=device)
    try:
        return torch.equal(_stretches_by_address(probe), _stretches_within(probe))
    except (AttributeError, RuntimeError, TypeError):
        return False


def _is_dense(weight: Tensor) -> bool:
    """Whether the weight's elements lie without gaps from its first one on, in whatever order."""
    if weight.is_contiguous():
        return True
    spans = ((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return 1 + sum(spans) == weight.numel()


def _differs(entry: _Entry, now: Tensor) -> bool | Tensor:
    """Whether a weight's stretches, flat int16, have other bits than the last step left; on a device a tensor."""
    tracked = entry.tracked
    # A state that was written to as well is a checkpoint, loaded in place: weight and state agree.
    if tracked.state_version != entry.state._version:
        return False
    bits = None if tracked.sample is None else tracked.sample.left
    if bits is None:
        return entry.reordered
    left = _integers(bits)[tracked.offset : tracked.offset + now.numel()]
    return not torch.equal(now, left) if reads_at_once(now.device) else now.ne(left).any()


def _rounds_elsewhere(master: Tensor, weight: Tensor) -> Tensor:
    """Mask of the elements whose master weight does not round to the weight; a NaN rounds to a NaN."""
    rounded = master.to(weight.dtype)
    return rounded.ne(weight).logical_and_(rounded.isnan().logical_and_(weight.isnan()).logical_not_())


def _too_large(entry: _Entry) -> Tensor:
    """Mask of the elements whose residual is larger than a step can leave.

    Bits below a weight are never more than half a gap, but below a zero there are none: they would make it a NaN.
    The gap is that away from zero, 2^(e - 7) in bfloat16: from a power of two towards zero it is half as wide.
    """
    weight, residual, strategy = entry.weight, entry.state, entry.strategy
    if not residual.dtype.is_floating_point:
        return weight.eq(0).logical_and_(residual.ne(0))
    if residual.dtype != weight.dtype:
        return torch.zeros_like(weight, dtype=torch.bool)
    # Rounding to nearest leaves at most half a gap. With inexact arithmetic, or random rounding below the smallest
    # normal number, a residual can be up to a whole gap.
    nearest = strategy.parameter is StateStorage.PAIR and not strategy.stochastic
    largest = 0.5 if nearest and entry.group["arithmetic"] == "fp32" else 1.0
    layout = format_of(weight.dtype)
    exponent = ((1 << layout.exponent_bits) - 1) << layout.mantissa_bits
    power = weight.view(torch.int16).bitwise_and(exponent).view(weight.dtype).to(torch.float32)
    return residual.to(torch.float32).abs_().gt(power.mul_(largest * 2.0**-layout.mantissa_bits))


def _drop(entry: _Entry, written: Tensor) -> None:
    """Reset the parts beside the weight where it was written, so that its own value is the whole."""
    if entry.strategy.parameter_state == MASTER_PARAMETER:
        entry.state.copy_(torch.where(written, entry.weight.to(entry.state.dtype), entry.state))
    else:
        entry.state.masked_fill_(written, 0)
