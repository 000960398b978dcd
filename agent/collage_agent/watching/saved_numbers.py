"""Whether a launch resumes from the very numbers that an earlier one saved: bit-identical, or how far off and
where.

A training saves a checkpoint through `optimizer.state_dict()`. Only at that call, it keeps a checksum, a count of
steps and a few numbers of each weight and state, with the step. They are in the run's data folder, so this works
online and offline, and needs no server. A resumed launch is compared with these numbers before its first step. If
it has another folder (another machine's disk), or shards a tensor differently (2 ranks → 4), nothing is compared or
reported.

A difference is reported, not judged: weights may be changed on purpose. Three are losses, where the weights are
those that were saved: states that the first step has to make again, counts that begin again, and wide weights that
were rounded to 16 bits on the way. `ResumeCheck` finds the losses that need no saved numbers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from collage_agent.sample.state_mappings import state_of, step_of
from collage_agent.sample.stored_parts import PARAMETER, elementwise_state
from collage_agent.training.watched_parameters import WatchedParameter
from collage_agent.watching.kept_states import NARROW, holds, sample
from collage_monitor import wire
from collage_monitor.diagnosis import launch

__all__ = ["CheckpointComparison", "SavedNumbers"]

_CHECKED: Final = 1024
"""Elements of each tensor that the checksum is of, at equal distances."""
_KEPT: Final = 256
"""Of these, at equal distances again: by them it is told how far numbers are off."""
_MOST_NUMBERS: Final = 2**16
"""Of all tensors at a step: of many tensors fewer are kept of each."""
_TENSORS_A_WEIGHT: Final = 3
"""A weight and two moments."""
_MOST_STEPS: Final = 8
_NAMED: Final = 3
_COUNT: Final = "count of steps"
_LEAST_GONE: Final = 0.05
"""Of what a launch moved: where steps are large, rounding takes and adds alike."""
_FEWEST_NUMBERS: Final = 16
"""Numbers of a tensor that are no 16-bit numbers by chance."""


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """The summary of one tensor: its sharding and sampled values, those of a weight also as its launch began."""

    place: tuple[int, ...]
    dtype: str
    checksum: int
    numbers: tuple[float, ...]
    begun: tuple[float, ...] = ()

    def same(self, other: _Mark | None) -> bool:
        return other is not None and (other.checksum, other.dtype) == (self.checksum, self.dtype)


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

    def newest_first(self) -> Iterator[tuple[int, Numbers]]:
        """The saved steps and their summaries."""
        return iter(sorted(self._steps.items(), reverse=True))

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
        self.losses: list[wire.ResumeLoss] = []
        """What did not come back of what was saved."""
        self._begun: dict[str, Tensor] | None = None
        self._anew: list[tuple[str, str]] = []

    def keep(self, optimizer: Optimizer, watched: Sequence[WatchedParameter], step: int) -> None:
        """A checkpoint is being made after this step. Waits for the device."""
        if self.numbers is not None and not _swaps_weights(optimizer):
            self.numbers.keep(step, _numbers_of(optimizer, watched, self._begun or {}))

    def step_of_weights(self, optimizer: Optimizer, watched: Sequence[WatchedParameter]) -> int | None:
        """The newest saved step whose weights are those that there are now; None if there is none, or if none of
        them had moved until then. Waits for the device if anything was saved."""
        if self.numbers is None or _swaps_weights(optimizer):
            return None
        now: Numbers | None = None
        for step, saved in self.numbers.newest_first():
            now = now or _numbers_of(optimizer, watched, {})
            weights = {layer: marks[PARAMETER] for layer, marks in saved.items() if PARAMETER in marks}
            moved = any(mark.begun and mark.begun != mark.numbers for mark in weights.values())
            if moved and all(mark.same(now.get(layer, {}).get(PARAMETER)) for layer, mark in weights.items()):
                return step
        return None

    def begin(self, optimizer: Optimizer, watched: Sequence[WatchedParameter], step: int) -> None:
        """This step is about to be taken, the first of a launch. Waits for the device if its numbers were saved."""
        if self._begun is not None or self.numbers is None:
            return
        here = [entry for entry in watched if entry.shard.elements]
        kept = _kept_of_each(here)
        self._begun = {
            entry.name: sample(sample(local_part(entry.parameter), _CHECKED), kept).clone() for entry in here
        }
        saved = self.numbers.at(step - 1)
        if saved is not None:
            now = _numbers_of(optimizer, watched, {})
            self.continuation = _goes_on_from(saved, now, step - 1)
            if self.continuation is not None and not self.continuation.weights.differing:
                self._anew = list(_not_there(saved, now))
                self.losses += _counts_again(saved, now, step)
            self.losses += _rounded(saved, now, step)

    def after(
        self,
        optimizer: Optimizer,
        watched: Sequence[WatchedParameter],
        step: int,
        told: Collection[str | None] = (),
    ) -> None:
        """It has been taken: states that it had to make were lost, as far as the optimizer still keeps such; told:
        those whose loss somebody else has told."""
        anew, self._anew = [(layer, key) for layer, key in self._anew if key not in told], []
        if not anew or self.continuation is None:
            return
        states = {entry.name: state_of(optimizer, entry.parameter) for entry in watched}
        made = [(layer, key) for layer, key in anew if key in states.get(layer, {})]
        filled = [(layer, key) for layer, key in made if bool(local_part(states[layer][key]).count_nonzero())]
        if len(made) == len(anew) and filled:
            layers = list(dict.fromkeys(layer for layer, _ in filled))
            of_all = self.continuation.states.tensors
            self.losses.append(launch.states_forgotten(len(filled), of_all, layers, step - 1, step))


def _swaps_weights(optimizer: Optimizer) -> bool:
    """Whether it saves other weights than it steps, as schedule-free optimizers do."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _kept_of_each(here: Sequence[WatchedParameter]) -> int:
    return min(max(_MOST_NUMBERS // max(_TENSORS_A_WEIGHT * len(here), 1), 1), _KEPT)


def _numbers_of(optimizer: Optimizer, watched: Sequence[WatchedParameter], begun: Mapping[str, Tensor]) -> Numbers:
    """Checksums and a few numbers of all that is watched and of its states. Waits for the device."""
    here = [entry for entry in watched if entry.shard.elements]
    kept = _kept_of_each(here)
    return {entry.name: dict(_marks(optimizer, entry, kept, begun.get(entry.name))) for entry in here}


def _marks(
    optimizer: Optimizer, entry: WatchedParameter, kept: int, begun: Tensor | None
) -> Iterator[tuple[str, _Mark]]:
    shard, state = entry.shard, state_of(optimizer, entry.parameter)
    place = (*shard.shape, -1, *((shard.start,) if shard.start is not None else ()))
    started = () if begun is None else tuple(begun.to(torch.float64).tolist())
    for key, tensor in {PARAMETER: entry.parameter.detach(), **elementwise_state(entry.parameter, state)}.items():
        checksum, numbers = 0, tuple[float, ...]()
        for part in stored_tensors(tensor):
            sampled = sample(local_part(part), _CHECKED).contiguous().cpu()
            checksum = crc32(sampled.view(torch.uint8).numpy().tobytes(), checksum)
            if not is_quantised(local_part(tensor)):
                numbers = tuple(sample(sampled, kept).to(torch.float64).tolist())
        of_weight = started if key == PARAMETER else ()
        place_now = (*place, local_part(tensor).numel())
        yield str(key), _Mark(place_now, dtype_name(tensor.dtype), checksum, numbers, of_weight)
    if (count := step_of(state)) is not None:
        yield _COUNT, _Mark((), "", 0, (float(count.max() if isinstance(count, Tensor) else count),))


def _states_in(saved: Numbers, now: Numbers) -> Iterator[tuple[str, str, _Mark, _Mark | None]]:
    """(layer, state or PARAMETER, as it was saved, as it is now) of all that can be compared."""
    for layer, before in saved.items():
        for key, mark in before.items():
            other = now.get(layer, {}).get(key)
            if layer in now and key != _COUNT and (other is None or other.place == mark.place):
                yield layer, key, mark, other


def _goes_on_from(saved: Numbers, now: Numbers, step: int) -> wire.Continuation | None:
    """How a launch's start differs from the state saved after `step`; None if nothing is comparable."""
    compared = {True: 0, False: 0}
    apart: dict[bool, list[str]] = {True: [], False: []}
    missing: list[str] = []
    cast: list[str] = []
    farthest: tuple[float, str] = (0.0, "")
    for layer, key, mark, other in _states_in(saved, now):
        is_weight = key == PARAMETER
        compared[is_weight] += 1
        if mark.same(other):
            continue
        apart[is_weight].append(layer)
        name = layer if is_weight else f"{layer} ({key})"
        if other is None:
            missing.append(name)
            continue
        farthest = max(farthest, (_distance(mark.numbers, other.numbers), name))
        if (narrower := _rounded_to(mark, other)) is not None:
            cast.append(f"{name}: {narrower}")
    if not compared[True]:
        return None
    weights, states = (_compared(compared[of_weights], apart[of_weights]) for of_weights in (True, False))
    return wire.Continuation(
        step=step,
        weights=weights,
        states=states,
        missing=_compared(compared[False], missing),
        cast=_compared(sum(compared.values()), cast),
        distance=farthest[0],
        farthest=farthest[1],
    )


def _compared(tensors: int, differing: Sequence[str]) -> wire.Compared:
    return wire.Compared(tensors=tensors, differing=len(differing), layers=list(dict.fromkeys(differing))[:_NAMED])


def _not_there(saved: Numbers, now: Numbers) -> Iterator[tuple[str, str]]:
    """States that held something, and are missing or 0."""
    for layer, key, mark, other in _states_in(saved, now):
        if key != PARAMETER and any(mark.numbers) and (other is None or (other.numbers and not any(other.numbers))):
            yield layer, key


def _counts_again(saved: Numbers, now: Numbers, step: int) -> Iterator[wire.ResumeLoss]:
    """Layers that came back with their states, and with fewer steps than were saved."""
    fewer: dict[str, tuple[float, float]] = {}
    for layer, before in saved.items():
        was, counted = before.get(_COUNT), now.get(layer, {}).get(_COUNT)
        if was is not None and counted is not None and counted.numbers < was.numbers:
            fewer[layer] = was.numbers[0], counted.numbers[0]
    if fewer:
        was_first, now_first = next(iter(fewer.values()))
        yield launch.counts_again(list(fewer), was_first, now_first, step)


def _rounded(saved: Numbers, now: Numbers, step: int) -> Iterator[wire.ResumeLoss]:
    """Weights in 32 bits that are 16-bit numbers now, and were not when they were saved."""
    layers: dict[str, str] = {}
    compared, moved, gone = 0, 0.0, 0.0
    for layer, key, mark, other in _states_in(saved, now):
        if key != PARAMETER or other is None or other.dtype != mark.dtype:
            continue
        compared += 1
        narrower = _rounded_to(mark, other)
        if narrower is not None:
            layers[layer] = narrower
        if narrower is not None and len(mark.begun) == len(mark.numbers):
            for begun, then, here in zip(mark.begun, mark.numbers, other.numbers, strict=True):
                moved += (then - begun) ** 2
                gone += (then - begun) * (then - here)
    share = gone / moved if moved else None
    if layers and (share is None or share > _LEAST_GONE):
        dtypes = " and ".join(dict.fromkeys(layers.values()))
        yield launch.weights_rounded(list(layers), compared, dtypes, share, step)


def _rounded_to(before: _Mark, now: _Mark) -> str | None:
    """The 16-bit dtype whose numbers these are now, and were not before; None: there is none."""
    if before.same(now) or len(now.numbers) < _FEWEST_NUMBERS:
        return None
    then, here = (torch.tensor(own.numbers, dtype=torch.float64) for own in (before, now))
    for dtype in NARROW:
        near = (here - then).abs() <= torch.finfo(dtype).eps * torch.maximum(here.abs(), then.abs())
        if holds(dtype, here) and not holds(dtype, then) and bool(near.all()):
            return dtype_name(dtype)
    return None


def _distance(before: Sequence[float], now: Sequence[float]) -> float:
    """‖now − before‖ / ‖before‖ of the numbers that both have; 0 where that is not known."""
    squares = sum(x * x for x in before)
    if not squares or len(before) != len(now):
        return 0.0
    found = (sum((y - x) ** 2 for x, y in zip(before, now, strict=True)) / squares) ** 0.5
    return found if found < float("inf") else 0.0
