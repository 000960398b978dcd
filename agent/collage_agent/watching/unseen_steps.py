"""Steps that call no hook: a CUDA graph replays captured operations, or other code steps the weights.

Such steps are noticed by their traces: numbers that keep changing while no hook is called.

The hooks look at the beginning of a step, a run while it logs. It finds that steps were taken, never what they did:
those are measured only where the user calls `Watch.before` and `after` (`tests/loops/test_unseen.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.sample.quantised_states import stored_tensors
from collage_agent.sample.state_mappings import state_of
from collage_agent.training.watched_parameters import WatchedParameter

__all__ = ["NOTES", "SeenBy", "UnseenSteps"]

SeenBy = Literal["hooks", "hand", "backward", "nobody"]
NOTES: Final[dict[SeenBy, str]] = {
    "hooks": "",
    "hand": "its steps call no hook: they are measured between handle.before() and handle.after()",
    "backward": "its parameters are stepped one by one in the backward pass: one pass is one step",
    "nobody": "steps are taken that call no hook, by a CUDA graph that replays them or by other code, and are not "
    "measured: call handle.before() and handle.after() of this watch around what takes them, as around replay()",
}
"""What a watch says of a torch optimizer, by what tells of its steps."""
_TENSORS: Final = 8
_NUMBERS: Final = 16
_MOVES_OF_STATES: Final = 2
_MOVES_OF_WEIGHTS: Final = 3
_REMEMBERED: Final = 64
_LONGEST_PAUSE: Final = 31
"""Looks that are left out between two, at most, while nothing moves: who only logs does not pay for each time."""
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bits = tuple[int, ...]


class UnseenSteps:
    """Looks at one optimizer's numbers between its steps, and says whether something steps it unseen.

    A look reads up to 16 elements of 8 weights, of their gradients and states, bit by bit; none while hooks are
    called. A step moves an optimizer's states: twice in a row without a hook, to values not seen before, is proof.
    Loading a checkpoint, an EMA put in the weights' place and taken out again, and a training that rests leave the
    states alone. An optimizer without states is known by weights and gradients that both move, three times.
    """

    def __init__(self) -> None:
        self.found = False
        self._calls: int | None = None
        self._known: list[deque[Bits]] = []
        self._moves = 0
        self._pause = self._left_out = 0
        self._pending: tuple[Tensor, torch.cuda.Event, list[int]] | None = None

    def look(
        self,
        calls: int | None,
        optimizer: Optimizer,
        watched: Sequence[WatchedParameter],
        gradient_of: Callable[[WatchedParameter], Tensor | None],
    ) -> bool:
        """Look again, on the training's thread; True once, when steps are found to be unseen.

        calls: how often hooks were called so far; None: a step is being taken. Numbers on a device are read by a
        later look: nothing waits.
        """
        if self.found:
            return False
        if calls is None or calls != self._calls:
            self._calls, self._known, self._moves, self._pending = calls, [], 0, None
            self._pause = self._left_out = 0
            return False
        if self._left_out < self._pause:
            self._left_out += 1
            return False
        self._left_out = 0
        read = self._read(optimizer, watched, gradient_of)
        if read is not None:
            self._compare(*read)
        return self.found

    def _compare(self, weights: Bits, gradients: Bits, states: Bits) -> None:
        now, needed = ([states], _MOVES_OF_STATES) if states else ([weights, gradients], _MOVES_OF_WEIGHTS)
        if len(self._known) != len(now):
            self._known, self._moves = [deque([bits], _REMEMBERED) for bits in now], 0
            return
        moved = all(bits not in known for bits, known in zip(now, self._known, strict=True))
        self._moves += moved
        self._pause = 0 if moved else min(2 * self._pause + 1, _LONGEST_PAUSE)
        for bits, known in zip(now, self._known, strict=True):
            known.append(bits)
        self.found = self._moves >= needed

    def _read(
        self,
        optimizer: Optimizer,
        watched: Sequence[WatchedParameter],
        gradient_of: Callable[[WatchedParameter], Tensor | None],
    ) -> tuple[Bits, Bits, Bits] | None:
        """Numbers of weights, gradients and states; of the last look's from a device, None until they are here."""
        here = [entry for entry in watched if entry.stepped and entry.shard.elements]
        weights, gradients, states = list[Tensor](), list[Tensor](), list[Tensor]()
        with torch.no_grad():
            for entry in here[:: max(-(-len(here) // _TENSORS), 1)]:
                weights += _sampled(entry.parameter)
                gradients += _sampled(gradient_of(entry))
                for value in state_of(optimizer, entry.parameter).values():
                    states += _sampled(value)
            device = weights[0].device if weights else torch.device("cpu")
            # A graph on one device moves no tensors on others.
            parts = [
                [tensor for tensor in part if tensor.device == device] for part in (weights, gradients, states)
            ]
            if device.type != "cpu":
                return self._read_later(device, parts)
            of_weights, of_gradients, of_states = (
                tuple(number for tensor in part for number in tensor.tolist()) for part in parts
            )
            return of_weights, of_gradients, of_states

    def _read_later(
        self, device: torch.device, parts: Sequence[Sequence[Tensor]]
    ) -> tuple[Bits, Bits, Bits] | None:
        found = None
        if self._pending is not None:
            host, ready, sizes = self._pending
            if not ready.query():  # type: ignore[no-untyped-call]
                return None
            of_weights, of_gradients, of_states = (tuple(part.tolist()) for part in torch.split(host, sizes))
            found = of_weights, of_gradients, of_states
        sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
        host.copy_(torch.cat([tensor.to(torch.int64) for part in parts for tensor in part]), non_blocking=True)
        self._pending = host, torch.cuda.current_stream(device).record_event(), sizes
        return found


def _sampled(value: Any) -> Iterator[Tensor]:
    """A few elements along the longest dimension of a tensor's storage, as integers of its bits."""
    for stored in stored_tensors(value) if isinstance(value, Tensor) else ():
        part = stored.detach()
        bits = _BITS.get(part.element_size())
        if part.layout != torch.strided or bits is None or not part.numel():
            continue
        size, stride = max(zip(part.shape, part.stride(), strict=True), default=(1, 1))
        apart = -(-size // _NUMBERS)
        yield part.as_strided((-(-size // apart),), (stride * apart,)).view(bits)
