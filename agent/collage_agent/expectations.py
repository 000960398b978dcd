"""What a training is expected to keep, stated once, and looked at in every launch: `watch(expect=…)`.

How weights and states are kept is looked at after the first step of each launch, resumed ones included, and again
whenever states were loaded or parameter groups changed. EDQ and the share of lost updates are looked at on every
measured step, over the recent past. An expectation that is broken stays broken for this launch.
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collage_agent.measurement import Measurement
from collage_monitor import wire
from collage_monitor.errors import CollageError
from collage_monitor.statistics import (
    finish,
    has_interval,
    interval,
    reduce_shards,
    reduce_steps,
    statistics_for,
)
from collage_monitor.strategies import STRATEGIES

__all__ = ["BREACH_EXIT_STATUS", "Contract", "ExpectationBroken", "Expectations", "OnBreach"]

OnBreach = Literal["warn", "raise", "exit"]
BREACH_EXIT_STATUS: Final = 3
"""Exit status of a training that ends because an expectation is broken."""

_LOG = logging.getLogger("collage_agent")
_PRECISION: Final = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Bits of the significand of what can be asked for, the leading one included."""
_FORMS: Final = "a strategy's name, or strategy=…, weights=DTYPE, states=DTYPE, min_edq=…, max_lost=…"
_BESIDE: Final = ("_low", "_scale")
"""Ends of the names of what stands beside a weight or a state, and is none itself."""
_INTEGER: Final = re.compile(r"u?int(\d+)")
_RECENT_STEPS: Final = 32
_BOUNDS: Final = {"min_edq": "edq_ratio", "max_lost": "lost_update_ratio"}


class ExpectationBroken(CollageError):
    """Training does not keep what `watch(expect=…, on_breach="raise")` said it should."""


@dataclass(frozen=True)
class Expectations:
    """What is expected; None, and what is left out, is not looked at.

    strategy: how weights and states are kept, by its name. weights: least precision in which every watched weight
    is kept, itself, in a master weight, or with the bits beside it. states: least precision of every moving
    average, or of those named. min_edq, max_lost: bounds of `edq_ratio` and `lost_update_ratio` over the recent
    past; broken where the 95 % interval lies beyond, or the value, where no interval is known.
    """

    strategy: str | None = None
    weights: str | None = None
    states: Mapping[str, str] = field(default_factory=dict)
    min_edq: float | None = None
    max_lost: float | None = None

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | Expectations | None) -> Expectations | None:
        """What `watch(expect=…)` and COLLAGE_EXPECT take.

        Raises:
            ValueError, TypeError: a name or value that cannot be expected.
        """
        if given is None or isinstance(given, Expectations):
            return given
        if isinstance(given, str):
            given = _pairs(given)
        if not isinstance(given, Mapping):
            raise TypeError(f"expect={given!r}; pass {_FORMS}")
        values = dict(given)
        states = values.pop("states", None)
        found = {"": states} if isinstance(states, str) else dict(states or {})
        found.update({key.partition(".")[2]: values.pop(key) for key in list(values) if key.startswith("states.")})
        if unknown := values.keys() - {"strategy", "weights", "min_edq", "max_lost"}:
            raise ValueError(f"expect: {sorted(unknown)[0]!r} cannot be expected; pass {_FORMS}")
        for bound in _BOUNDS:
            if values.get(bound) is not None:
                values[bound] = _number(bound, values[bound])
        expected = cls(states=found, **values)
        if expected.strategy is not None and expected.strategy not in STRATEGIES:
            raise ValueError(f"expect: strategy {expected.strategy!r}; choose one of {', '.join(STRATEGIES)}")
        for dtype in (expected.weights, *found.values()):
            if dtype is not None and dtype not in _PRECISION:
                raise ValueError(f"expect: {dtype!r}; choose a dtype of {', '.join(_PRECISION)}")
        if expected == cls():
            raise ValueError(f"expect={given!r} expects nothing; pass {_FORMS}")
        return expected

    def __str__(self) -> str:
        states = {f"states.{name}" if name else "states": dtype for name, dtype in self.states.items()}
        named = {"strategy": self.strategy, "weights": self.weights, **states}
        named |= {bound: getattr(self, bound) for bound in _BOUNDS}
        return ",".join(f"{name}={value}" for name, value in named.items() if value is not None)

    def broken_by(self, info: wire.WatchInfo) -> Iterator[tuple[str, str]]:
        """(what was expected, the sentence) of each expectation about how things are kept that does not hold."""
        seen = info.fingerprint
        if self.strategy is not None and info.observed_strategy != self.strategy:
            why = seen.unexplained if seen is not None and seen.unexplained else f"{info.dtype} weights"
            yield "strategy", f"expected strategy {self.strategy}, seen is {info.observed_strategy} ({why})"
        if seen is None:
            return
        if self.weights is not None:
            yield from _narrow_weights(self.weights, info, seen)
        for name, dtype in self.states.items():
            kept = _averages(seen)
            narrow = [
                f"{state} in {words}"
                for state, words in kept.items()
                if name in ("", state) and _bits(words) < _PRECISION[dtype]
            ]
            if narrow:
                yield f"states.{name}", f"expected states in {dtype}, kept are {' and '.join(narrow)}"


class Contract:
    """Expectations of one watch. `broken` says which do not hold.

    windows: lengths over which updates are watched. Where weights are rounded at random one step's lost updates say
    nothing: they are looked at over the longest window, and without one not at all, which is said once.
    """

    def __init__(self, expected: Expectations, on_breach: OnBreach, windows: Sequence[int] = ()) -> None:
        self._expected, self._on_breach = expected, on_breach
        self._window = f"lost_window_ratio/{max(windows)}" if windows else None
        self._broken: dict[str, wire.Breach] = {}
        self._told = 0
        self._recent: deque[dict[str, NDArray[np.float64]]] = deque(maxlen=_RECENT_STEPS)
        self._late: list[tuple[int, list[str], Callable[[], NDArray[np.float64]]]] = []
        self._metrics = {bound: key for bound, key in _BOUNDS.items() if getattr(expected, bound) is not None}

    @property
    def broken(self) -> list[wire.Breach]:
        """In order of time, each expectation once."""
        return list(self._broken.values())

    def look_at(self, info: wire.WatchInfo, step: int) -> None:
        """How weights and states are kept now. Reads no value: synchronises no device."""
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

    def measured(self, measurement: Measurement) -> None:
        """A measured step's numbers. On the host they are looked at now. On a device the first ones are waited for,
        once a launch; later ones are looked at when the next step is measured: nothing waits for them."""
        needed = {need for key in self._metrics.values() for need in statistics_for(key)}
        rows = [row for row, name in enumerate(measurement.layout.statistics) if name in needed]
        if not rows:
            return
        keys = [measurement.layout.statistics[row] for row in rows]
        first = not self._recent and not self._late
        chosen = measurement.totals[rows].detach()
        self._late.append((measurement.step, keys, _later(chosen, wait=first)))
        at_once = first or chosen.device.type == "cpu"
        taken = len(self._late) - (not at_once)
        for step, names, read in self._late[:taken]:
            self._recent.append(reduce_shards(dict(zip(names, read(), strict=True)), axis=0))
            self._judge(step)
        del self._late[:taken]

    def enforce(self) -> None:
        """Say what is newly broken, once; then go on, or end the training where that was asked for.

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
        """The recent past up to this step, merged, beside the bounds."""
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
    """The numbers, when they are asked for: from a device by a stream of their own, which waits for nobody else."""
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


def _narrow_weights(dtype: str, info: wire.WatchInfo, seen: wire.Fingerprint) -> Iterator[tuple[str, str]]:
    master = _bits(seen.states.get(seen.master or "", ""))
    bits_beside = _INTEGER.match(seen.states.get(seen.residual or "", ""))
    held = {name: _bits(name) for name in seen.parameters}
    for name, bits in held.items():
        # What completes weights stands beside the narrow ones alone.
        if bits < _PRECISION["float32"]:
            held[name] = max(bits + (int(bits_beside[1]) if bits_beside else 0), master)
    narrow = [name for name, bits in held.items() if bits < _PRECISION[dtype]]
    if narrow:
        how = STRATEGIES.get(info.observed_strategy)
        kept = "" if how is None or info.observed_strategy == "unknown" else f" ({how.keeps})"
        yield "weights", f"expected weights in {dtype}, kept are {' and '.join(sorted(narrow))}{kept}"


def _averages(seen: wire.Fingerprint) -> dict[str, str]:
    """Moving averages, and how each is kept: what completes a weight or a state is left out."""
    return {
        **{
            name: words
            for name, words in seen.states.items()
            if name not in (seen.master, seen.residual) and not name.endswith(_BESIDE)
        },
        **seen.factored,
    }


def _bits(words: str) -> int:
    """Bits of the significand of what is kept in these words; of what is mixed the fewest."""
    return min(_PRECISION.get(part, 0) for part in words.split(" and "))


def _pairs(text: str) -> dict[str, Any]:
    if "=" not in text:
        return {"strategy": text.strip()}
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        found[name.strip()] = value.strip()
    return found


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise ValueError(f"expect: {name}={value!r}; pass a number from 0 to 1")
    return number
