"""Counts steps that a loss scaler skipped because a gradient was not finite, without waiting for a device.

The measurer, windows and oracles ask for the scale, reports for the count. The scaler's verdict stays on its
device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = ["SkippedSteps", "loss_scaling", "most_skipped"]


class SkippedSteps:
    """Skipped steps of one optimizer since attach; `count` is None until a loss scaler has been used.

    When the scaler skips, most optimizers are not called at all, which only the scaler's own `step` shows; a fused
    one is called with a flag that is still on its device.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.tell: Callable[[], None] = _nobody
        """Called after each step for which the optimizer was not called."""
        self._optimizer = weakref.ref(optimizer)
        self._calls = 0
        self._missed = 0
        self._verdicts: Tensor | None = None
        self._scaled = False
        _listen(self)

    @property
    def count(self) -> float | Tensor | None:
        """A number, or a tensor [()] on the optimizer's device that is never written again."""
        if not self._scaled:
            return None
        return float(self._missed) if self._verdicts is None else self._verdicts + self._missed

    def count_call(self) -> None:
        """Count a call of the optimizer's step."""
        self._calls += 1

    def count_skipped(self, optimizer: Optimizer) -> None:
        """After a call: count it as skipped if a fused optimizer's flag says so. Does not synchronise."""
        _, skipped = loss_scaling(optimizer)
        if skipped is not None:
            verdict = skipped.detach().reshape(()).ne(0).to(torch.float64)
            self._verdicts = verdict if self._verdicts is None else self._verdicts + verdict
            self._scaled = True

    def stop(self) -> None:
        """Count no more."""
        _LISTENING.discard(self)


def most_skipped(counters: Iterable[SkippedSteps]) -> float | Tensor | None:
    """Skipped steps of the optimizer that skipped most; None where no loss scaler was seen."""
    counts = [count for counter in counters if (count := counter.count) is not None]
    if len(counts) < 2:
        return counts[0] if counts else None
    on_host = max((count for count in counts if isinstance(count, float)), default=0.0)
    on_device = [count for count in counts if isinstance(count, Tensor)]
    if not on_device:
        return on_host
    return torch.stack([count.to(on_device[0].device) for count in on_device]).amax().clamp(min=on_host)


def loss_scaling(optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """(divisor of the gradients, whether the step is skipped) of a loss scaler, None without one."""
    scale, skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return (
        scale if isinstance(scale, Tensor) else None,
        skipped if isinstance(skipped, Tensor) else None,
    )


def _nobody() -> None:
    """Nobody is to be told."""


_LISTENING: Final[weakref.WeakSet[SkippedSteps]] = weakref.WeakSet()


def _listen(counter: SkippedSteps) -> None:
    """Wrap the scaler's `step`, once per process, to see whether the optimizer was called from it."""
    _LISTENING.add(counter)
    original: Any = torch.amp.GradScaler.step
    if getattr(original, "tells_of_skipped_steps", False):
        return

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        counters = [(counter, counter._calls) for counter in list(_LISTENING) if counter._optimizer() is optimizer]
        result = original(scaler, optimizer, *args, **kwargs)
        for counter, calls in counters if scaler.is_enabled() else ():
            counter._scaled = True
            if counter._calls == calls:
                counter._missed += 1
                counter.tell()
        return result

    step.tells_of_skipped_steps = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.step = step  # type: ignore[method-assign, assignment]
