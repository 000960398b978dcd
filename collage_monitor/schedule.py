"""Schedules of the learning rate, written as one word: "cosine:3e-4:100:10000".

Forecasts and conditions read schedules by it; the words of a schedule are fixed (`docs/how-to/long-jobs.md`,
`tests/contract/test_forecast.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from collage_monitor.definitions import Array

__all__ = ["RateSchedule", "parse_schedule", "schedule_of"]

_KINDS: Final = ("constant", "cosine", "linear", "wsd")
_FORM: Final = "KIND:RATE:WARMUP:STEPS[:FINAL], such as cosine:3e-4:100:10000; a wsd ends in [:DECAY[:FINAL]]"
_DECAY_SHARE: Final = 0.2
_MOST_STEPS: Final = 10_000_000


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate of each step of a run: [steps], of steps 1 to `steps`; `text` says it in words."""

    rates: Array
    text: str

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return len(self.rates)


def parse_schedule(text: str) -> RateSchedule:
    """A schedule from KIND:RATE:WARMUP:STEPS[:FINAL], kinds constant, cosine, linear and wsd.

    The rate rises in WARMUP steps to RATE. Then it stays (constant), or falls to FINAL, by default 0, along half a
    cosine or a line. With wsd:RATE:WARMUP:STEPS[:DECAY[:FINAL]] it stays, and falls along a line in the last DECAY
    steps, by default a fifth of STEPS.

    Raises:
        ValueError: another form, or numbers that make no schedule; the message says which.
    """
    kind, *parts = text.strip().split(":")
    most = {"constant": 3, "wsd": 5}.get(kind, 4)
    if kind not in _KINDS or not 3 <= len(parts) <= most:
        raise ValueError(f"schedule {text!r}: write {_FORM}; kinds are {', '.join(_KINDS)}")
    try:
        rate, warm_up, steps = float(parts[0]), int(parts[1]), int(parts[2])
        decay = int(parts[3]) if kind == "wsd" and len(parts) > 3 else round(_DECAY_SHARE * steps)
        final = float(parts[-1]) if len(parts) == most and kind != "constant" else 0.0
    except ValueError:
        raise ValueError(f"schedule {text!r}: not all of it are numbers; write {_FORM}") from None
    if not 0 < rate < float("inf") or not 0 <= final <= rate:
        raise ValueError(f"schedule {text!r}: RATE must be above 0, and FINAL between 0 and RATE")
    if not 0 <= warm_up < steps <= _MOST_STEPS or not 0 < decay <= steps:
        raise ValueError(
            f"schedule {text!r}: WARMUP and DECAY must be parts of STEPS, which is {_MOST_STEPS} at most"
        )
    return RateSchedule(_rates(kind, rate, warm_up, steps, decay, final), text.strip())  # type: ignore[arg-type]


def schedule_of(given: str | Callable[[int], float], steps: int | None = None) -> RateSchedule:
    """The schedule that a text means, see `parse_schedule`, or that a function gives for steps 1 to `steps`.

    Raises:
        ValueError: no schedule, or a function without `steps`.
    """
    if isinstance(given, str):
        return parse_schedule(given)
    if steps is None or not 0 < steps <= _MOST_STEPS:
        raise ValueError(f"steps={steps}: pass how many steps the run has, beside a schedule that is a function")
    rates = np.fromiter((float(given(step)) for step in range(1, steps + 1)), np.float64, steps)
    if not np.isfinite(rates).all() or (rates < 0).any():
        raise ValueError("the schedule gives rates that are negative or not finite; it must give one for each step")
    return RateSchedule(rates, f"given for {steps:,} steps")


def _rates(
    kind: Literal["constant", "cosine", "linear", "wsd"],
    rate: float,
    warm_up: int,
    steps: int,
    decay: int,
    final: float,
) -> Array:
    """As transformers' and torch's schedulers: step n has the rate of n − 1 steps taken."""
    taken = np.arange(steps, dtype=np.float64)
    falling = decay if kind == "wsd" else steps - warm_up
    done = np.clip((taken - (steps - falling)) / falling, 0.0, 1.0)
    left = {
        "constant": np.ones(steps),
        "cosine": 0.5 * (1.0 + np.cos(np.pi * done)),
    }.get(kind, 1.0 - done)
    rising = np.minimum(1.0, (taken + 1.0) / warm_up) if warm_up else np.ones(steps)
    rates: Array = np.minimum(rising * rate, final + (rate - final) * left)
    return rates
