"""What watching an average of the weights costs: CPU of the agent over CPU of the training step with its average.

The bf16 byte-level GPT of `benchmarks.watch`, one thread, torch's `AveragedModel`, the watch at its defaults. A
round is 100 updates of a watch that has gone on for a while: one of them is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import collage_agent as collage
import torch
from collage_agent.watching.average_watch import AverageWatch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._training import Training

__all__ = ["measure"]

ROUNDS, UPDATES = 3, 100
LIMIT_PERCENT = 0.1


class _Timed:
    """Adds up the CPU seconds of a watch's methods."""

    def __init__(self, watch: AverageWatch, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(watch, name, self._of(getattr(watch, name)))

    def _of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.thread_time()
            result = method(*arguments)
            self.seconds += time.thread_time() - started
            return result

        return run


def measure(options: Options) -> Measuring:
    """The share of each round, in percent of what the step and its average's update take without the agent."""
    torch.set_num_threads(1)
    training = Training(options.seed)
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))  # type: ignore[no-untyped-call]
    watch = collage.watch_average(average, training.model)
    timed = _Timed(watch, "_announced", "_updated")
    for _ in range(UPDATES + 1):  # the first copies, and of the next 100 each tenth is measured
        average.update_parameters(training.model)
    shares, milliseconds = [], []
    for _ in range(options.rounds or ROUNDS):
        timed.seconds, started = 0.0, time.thread_time()
        for _ in range(UPDATES):
            training.step()
            average.update_parameters(training.model)
        rest = time.thread_time() - started - timed.seconds
        shares.append(100.0 * timed.seconds / rest)
        milliseconds.append(1000.0 * timed.seconds / UPDATES)
    yield Figure("watching an average, defaults", "% of the step's CPU", tuple(shares), LIMIT_PERCENT)
    yield Figure("watching an average, defaults", "ms an update", tuple(milliseconds))
    return [f"{training.parameters:,} parameters in {len([*training.model.parameters()])} tensors"]


if __name__ == "__main__":
    raise SystemExit(main("benchmarks.averages", "What watching an average of the weights costs.", measure))
