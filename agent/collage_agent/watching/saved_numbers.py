"""Whether a launch resumes from the very numbers that an earlier one saved: bit-identical, or how far off and
where.

A training saves a checkpoint through `optimizer.state_dict()`. Only at that call, it keeps a checksum and a few
numbers of each weight and state, with the step. They are in the run's data folder, so this works online and
offline, and needs no server. A resumed launch is compared with these numbers before its first step. If it has
another folder (another machine's disk), or shards a tensor differently (2 ranks → 4), nothing is compared or
reported.

A difference is reported, not judged: weights may be changed on purpose. `ResumeCheck` finds the losses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec
import torch
from collage_optim.names import dtype_name
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.sample.quantised_states import is_quantised, stored_tensors
from collage_agent.sample.state_mappings import state_of
from collage_agent.sample.stored_parts import PARAMETER, elementwise_state
from collage_agent.training.watched_parameters import WatchedParameter
from collage_monitor import wire

__all__ = ["CheckpointComparison", "SavedNumbers"]

_CHECKED: Final = 1024
"""Elements of each tensor that the checksum is of, at equal distances."""
_KEPT: Final = 32
"""Of these, at equal distances again: by them it is told how far numbers are off."""
_MOST_NUMBERS: Final = 2**16
"""Of all tensors at a step: with more than 2,048 of them fewer are kept of each."""
_MOST_STEPS: Final = 8
_NAMED: Final = 3


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """The summary of one tensor: its sharding and its sampled values."""

    place: tuple[int, ...]
    dtype: str
    checksum: int
    numbers: tuple[float, ...]


Numbers = dict[str, dict[str, _Mark]]
"""By layer, then by state; the weight is under PARAMETER."""


class SavedNumbers:
    """Summaries of the last few saved steps, in one file for each rank and optimizer of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._steps = msgspec.msgpack.decode(path.read_bytes(), type=dict[int, Numbers])
        except (OSError, msgspec.MsgspecError):
            self._steps = {}

    def at(self, step: int) -> Numbers | None:
        """The summary saved after this step; None if there is none."""
        return self._steps.get(step)

    def keep(self, step: int, numbers: Numbers) -> None:
        """Remember them, and on disk. Later saved steps are dropped, because no launch resumed from them."""
        known = {other: value for other, value in self._steps.items() if other < step}
        self._steps = dict(sorted(known.items())[1 - _MOST_STEPS :]) | {step: numbers}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        made = self._path.with_suffix(f".{os.getpid()}")
        made.write_bytes(msgspec.msgpack.encode(self._steps))
        made.replace(self._path)


class CheckpointComparison:
    """Keeps a summary at each checkpoint, and compares the start of a launch with the one that it goes on from."""

    def __init__(self) -> None:
        self.numbers: SavedNumbers | None = None
        """Those of this run; None outside one, where nothing is kept or compared: its checkpoints cost nothing."""
        self.continuation: wire.Continuation | None = None
        """How the launch began, once it has."""
        self._began = False

    def keep(self, optimizer: Optimizer, watched: Sequence[WatchedParameter], step: int) -> None:
        """A checkpoint is being made after this step. Waits for the device."""
        if self.numbers is not None and not _swaps_weights(optimizer):
            self.numbers.keep(step, _numbers_of(optimizer, watched))

    def begin(self, optimizer: Optimizer, watched: Sequence[WatchedParameter], step: int) -> None:
        """This step is about to be taken, the first of a launch. Waits for the device if its numbers were saved."""
        began, self._began = self._began, True
        saved = None if began or self.numbers is None else self.numbers.at(step - 1)
        if saved is not None:
            self.continuation = _goes_on_from(saved, _numbers_of(optimizer, watched), step - 1)


def _swaps_weights(optimizer: Optimizer) -> bool:
    """Whether it saves other weights than it steps, as schedule-free optimizers do."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _numbers_of(optimizer: Optimizer, watched: Sequence[WatchedParameter]) -> Numbers:
    """Checksums and a few numbers of all that is watched and of its states. Waits for the device."""
    here = [entry for entry in watched if entry.shard.elements]
    states = [elementwise_state(entry.parameter, state_of(optimizer, entry.parameter)) for entry in here]
    kept = min(max(_MOST_NUMBERS // max(len(here) + sum(map(len, states)), 1), 1), _KEPT)
    return {entry.name: dict(_marks(entry, own, kept)) for entry, own in zip(here, states, strict=True)}


def _marks(entry: WatchedParameter, states: Mapping[str, Tensor], kept: int) -> Iterator[tuple[str, _Mark]]:
    shard = entry.shard
    place = (*shard.shape, -1, *((shard.start,) if shard.start is not None else ()))
    for key, tensor in {PARAMETER: entry.parameter.detach(), **states}.items():
        checksum, numbers = 0, tuple[float, ...]()
        for part in stored_tensors(tensor):
            sampled = _evenly(local_part(part).detach(), _CHECKED).contiguous().cpu()
            checksum = crc32(sampled.view(torch.uint8).numpy().tobytes(), checksum)
            if not is_quantised(local_part(tensor)):
                numbers = tuple(_evenly(sampled, kept).to(torch.float64).tolist())
        yield str(key), _Mark((*place, local_part(tensor).numel()), dtype_name(tensor.dtype), checksum, numbers)


def _evenly(tensor: Tensor, most: int) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(-(-flat.numel() // most), 1)]


def _goes_on_from(saved: Numbers, now: Numbers, step: int) -> wire.Continuation | None:
    """How a launch's start differs from the state saved after `step`; None if nothing is comparable."""
    compared = {True: 0, False: 0}
    apart: dict[bool, list[str]] = {True: [], False: []}
    farthest: tuple[float, str] = (0.0, "")
    for layer, before in saved.items():
        for key, mark in before.items():
            other = now.get(layer, {}).get(key)
            if layer not in now or (other is not None and other.place != mark.place):
                continue
            is_weight = key == PARAMETER
            compared[is_weight] += 1
            if other is not None and (other.checksum, other.dtype) == (mark.checksum, mark.dtype):
                continue
            apart[is_weight].append(layer)
            if other is not None:
                name = layer if is_weight else f"{layer} ({key})"
                farthest = max(farthest, (_distance(mark.numbers, other.numbers), name))
    if not compared[True]:
        return None
    weights, states = (
        wire.Compared(
            tensors=compared[of_weights],
            differing=len(apart[of_weights]),
            layers=list(dict.fromkeys(apart[of_weights]))[:_NAMED],
        )
        for of_weights in (True, False)
    )
    return wire.Continuation(step=step, weights=weights, states=states, distance=farthest[0], farthest=farthest[1])


def _distance(before: Sequence[float], now: Sequence[float]) -> float:
    """‖now − before‖ / ‖before‖ of the numbers that both have; 0 where that is not known."""
    squares = sum(x * x for x in before)
    if not squares or len(before) != len(now):
        return 0.0
    found = (sum((y - x) ** 2 for x, y in zip(before, now, strict=True)) / squares) ** 0.5
    return found if found < float("inf") else 0.0
