"""Checks a training against its expectations, in every launch.

It checks how weights and states are kept after the first step of each launch, resumed ones included, and again
whenever states are loaded or parameter groups change. EDQ and the share of lost updates are looked at on every
measured step, over the recent past. An expectation that is broken stays broken for this launch.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collage_agent.expectations import BOUNDS, BREACH_EXIT_STATUS, ExpectationBroken, Expectations, OnBreach
from collage_agent.measurement import Layout
from collage_monitor import wire
from collage_monitor.diagnosis import RECENT_STEPS
from collage_monitor.statistics import (
    finish,
    has_interval,
    interval,
    reduce_shards,
    reduce_steps,
    statistics_for,
)
from collage_monitor.strategies import STRATEGIES

__all__ = ["Contract"]

_LOG = logging.getLogger("collage_agent")


class Contract:
    """Expectations of one watch. `broken` says which do not hold.

    windows: lengths over which updates are watched. If weights are rounded at random, one step's lost updates say
    nothing: they are looked at over the longest window, and without one not at all, which is said once.
    """

    def __init__(self, expected: Expectations, on_breach: OnBreach, windows: Sequence[int] = ()) -> None:
        self._expected, self._on_breach = expected, on_breach
        self._window = f"lost_window_ratio/{max(windows)}" if windows else None
        self._broken: dict[str, wire.Breach] = {}
        self._told = 0
        self._recent: deque[dict[str, NDArray[np.float64]]] = deque(maxlen=RECENT_STEPS)
        self._late: list[tuple[int, bool, list[str], Callable[[], NDArray[np.float64]]]] = []
        self._rows: dict[str, int] = {}
        self._metrics = {bound: key for bound, key in BOUNDS.items() if getattr(expected, bound) is not None}

    @property
    def broken(self) -> list[wire.Breach]:
        """In order of time, each expectation once."""
        return list(self._broken.values())

    def look_at(self, layout: Layout, step: int) -> None:
        """A new layout: how weights and states are kept now, and which rows the bounds need. Reads no value."""
        info = layout.watch
        for key, text in self._expected.broken_by(info):
            self._note(key, text, step)
        seen, known = info.fingerprint, STRATEGIES.get(info.observed_strategy)
        at_random = seen is not None and (seen.stochastic_rounding or any(seen.layer_rounds_at_random.values()))
        if (at_random or (known is not None and known.stochastic)) and "max_lost" in self._metrics:
            if self._window is None:
                del self._metrics["max_lost"]
                _LOG.warning(
                    "expect: max_lost is not looked at: weights are rounded at random, and single steps say "
                    "nothing; watch with windows=(64,)"
                )
            else:
                self._metrics["max_lost"] = self._window
        needed = {need for key in self._metrics.values() for need in statistics_for(key)}
        self._rows = {name: row for row, name in enumerate(layout.statistics) if name in needed}

    def measured(self, totals: Tensor, step: int, *, begins: bool) -> None:
        """A measured step's totals, [statistic][layer] in the layout's order; begins: of the recent past the first.

        On the host they are looked at now. On a device the first ones are waited for, once a launch; later ones are
        looked at when the next step is measured: nothing waits for them.
        """
        if not self._rows:
            return
        first = not self._recent and not self._late
        chosen = totals[list(self._rows.values())].detach()
        self._late.append((step, begins, list(self._rows), _later(chosen, wait=first)))
        at_once = first or chosen.device.type == "cpu"
        taken = len(self._late) - (not at_once)
        for of_step, is_first, names, read in self._late[:taken]:
            if is_first:
                self._recent.clear()
            self._recent.append(reduce_shards(dict(zip(names, read(), strict=True)), axis=0))
            self._judge(of_step)
        del self._late[:taken]

    def enforce(self) -> None:
        """Report new breaches once; then continue, or end the training if requested.

        Raises:
            ExpectationBroken: on_breach is "raise".
            SystemExit: on_breach is "exit", with status BREACH_EXIT_STATUS.
        """
        new = self.broken[self._told :]
        if not new:
            return
        self._told += len(new)
        text = "expectation broken: " + "; ".join(map(str, new))
        if self._on_breach == "raise":
            raise ExpectationBroken(text)
        _LOG.error("%s", text)
        if self._on_breach == "exit":
            raise SystemExit(BREACH_EXIT_STATUS)

    def _judge(self, step: int) -> None:
        """Compare the recent past up to this step, merged, with the bounds."""
        keys = set.intersection(*(set(totals) for totals in self._recent))
        merged = reduce_steps({key: np.array([totals[key] for totals in self._recent]) for key in keys}, axis=0)
        for bound, key in self._metrics.items():
            limit = getattr(self._expected, bound)
            value = float(finish(key, merged))
            low, high = map(float, interval(key, merged)) if has_interval(key, merged) else (math.nan, math.nan)
            low, high = value if math.isnan(low) else low, value if math.isnan(high) else high
            if high < limit if bound == "min_edq" else low > limit:
                most = "at least" if bound == "min_edq" else "at most"
                self._note(bound, f"expected {key} of {most} {limit:g}, measured is {value:.4g}", step)

    def _note(self, expectation: str, text: str, step: int) -> None:
        self._broken.setdefault(expectation, wire.Breach(expectation=expectation, text=text, step=step))


def _later(chosen: Tensor, *, wait: bool) -> Callable[[], NDArray[np.float64]]:
    """A function that reads the numbers; from a device it uses its own stream, so it waits for no other work."""
    if chosen.device.type != "cuda" or wait:
        return lambda: chosen.cpu().numpy()
    ready = torch.cuda.current_stream(chosen.device).record_event()

    def read() -> NDArray[np.float64]:
        own: Any = torch.cuda.Stream(chosen.device)  # type: ignore[no-untyped-call]
        own.wait_event(ready)
        chosen.record_stream(own)
        with torch.cuda.stream(own):
            return chosen.cpu().numpy()

    return read
