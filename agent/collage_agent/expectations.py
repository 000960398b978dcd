"""The expectations of a training: `watch(expect=…)`.

Here they are read, and turned into bounds. `watching/expectation_check.py` holds a training to them.

The words that may be expected are the user's interface (`docs/`), and 3, the exit status, is what scripts test for:
both are fixed (`tests/agent/watching/test_expectations.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from collage_monitor import wire
from collage_monitor.errors import CollageError
from collage_monitor.strategies import STRATEGIES

__all__ = ["BOUNDS", "BREACH_EXIT_STATUS", "ExpectationBroken", "Expectations", "OnBreach"]

OnBreach = Literal["warn", "raise", "exit"]
BREACH_EXIT_STATUS: Final = 3
"""Exit status of a training that ends because an expectation is broken."""

BOUNDS: Final = {"min_edq": "edq_ratio", "max_lost": "lost_update_ratio"}
"""Expectations that are numbers, and the metric that each bounds."""
_PRECISION: Final = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Bits of the significand of what can be asked for, the leading one included."""
_FORMS: Final = "a strategy's name, resumed, or strategy=…, weights=DTYPE, states=DTYPE, min_edq=…, max_lost=…"
_RESUMED: Final = "resumed"
_BESIDE: Final = ("_low", "_scale")
"""Ends of the names of what stands beside a weight or a state, and is none itself."""
_INTEGER: Final = re.compile(r"u?int(\d+)")
_KEPT: Final = re.compile(r"(\w+)(?: with (\d+) bits beside it)?")
"""How one number is kept: a dtype, and the bits of an integer that lengthen it."""


class ExpectationBroken(CollageError):
    """The training breaks an expectation of `watch(expect=…, on_breach="raise")`."""


@dataclass(frozen=True)
class Expectations:
    """Expectations; None and missing ones are not checked.

    strategy: how weights and states are kept, by its name. weights: least precision in which every watched weight
    is kept, itself, in a master weight, or with the bits beside it. states: least precision of every moving
    average, or of those named. min_edq, max_lost: bounds of `edq_ratio` and `lost_update_ratio` over the recent
    past; broken if the 95 % interval lies beyond the bound, or the value if there is no interval. resumed: this
    launch goes on from a checkpoint, and lost nothing of it.
    """

    strategy: str | None = None
    weights: str | None = None
    states: Mapping[str, str] = field(default_factory=dict)
    min_edq: float | None = None
    max_lost: float | None = None
    resumed: bool = False

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | Expectations | None) -> Expectations | None:
        """Read the forms that `watch(expect=…)` and COLLAGE_EXPECT accept.

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
        if unknown := values.keys() - {"strategy", "weights", "min_edq", "max_lost", _RESUMED}:
            raise ValueError(f"expect: {sorted(unknown)[0]!r} cannot be expected; pass {_FORMS}")
        for bound in BOUNDS:
            if values.get(bound) is not None:
                values[bound] = _number(bound, values[bound])
        if values.get(_RESUMED, True) not in (True, "true"):
            raise ValueError(f"expect: resumed={values[_RESUMED]!r}; pass True, or leave it out")
        values[_RESUMED] = _RESUMED in values
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
        named |= {bound: getattr(self, bound) for bound in BOUNDS}
        named |= {_RESUMED: "true"} if self.resumed else {}
        return ",".join(f"{name}={value}" for name, value in named.items() if value is not None)

    def broken_by(self, info: wire.WatchInfo) -> Iterator[tuple[str, str]]:
        """(expectation, sentence) for each broken expectation about how weights and states are kept."""
        seen = info.fingerprint
        if self.resumed:
            yield from _not_resumed(info)
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


def _not_resumed(info: wire.WatchInfo) -> Iterator[tuple[str, str]]:
    """A launch that begins at step 1, or not with all that the checkpoint held."""
    found = [loss.text for loss in info.resume_losses]
    going_on = info.continuation
    if going_on is not None and (going_on.weights.differing or going_on.states.differing):
        found.append(str(going_on))
    if not info.steps_before:
        found.insert(0, "the optimizer begins without steps")
    if found:
        yield _RESUMED, f"expected a resumed training: {'; '.join(found)}"


def _narrow_weights(dtype: str, info: wire.WatchInfo, seen: wire.Fingerprint) -> Iterator[tuple[str, str]]:
    master = _bits(seen.states.get(seen.master or "", ""))
    bits_beside = _INTEGER.match(seen.states.get(seen.residual or "", ""))
    held = {name: _bits(name) for name in seen.parameters}
    for name, bits in held.items():
        # Only narrow weights have a master weight or a residual.
        if bits < _PRECISION["float32"]:
            held[name] = max(bits + (int(bits_beside[1]) if bits_beside else 0), master)
    narrow = [name for name, bits in held.items() if bits < _PRECISION[dtype]]
    if narrow:
        how = STRATEGIES.get(info.observed_strategy)
        kept = "" if how is None or info.observed_strategy == "unknown" else f" ({how.keeps})"
        yield "weights", f"expected weights in {dtype}, kept are {' and '.join(sorted(narrow))}{kept}"


def _averages(seen: wire.Fingerprint) -> dict[str, str]:
    """Moving averages, and how each is kept: parts that complete a weight or a state are left out."""
    return {
        **{
            name: words
            for name, words in seen.states.items()
            if name not in (seen.master, seen.residual) and not name.endswith(_BESIDE)
        },
        **seen.factored,
    }


def _bits(words: str) -> int:
    """Bits of the significand that these words describe; the fewest if they name several dtypes."""
    found = [_KEPT.fullmatch(part) for part in words.split(" and ")]
    return min(_PRECISION.get(one[1], 0) + int(one[2] or 0) if one else 0 for one in found)


def _pairs(text: str) -> dict[str, Any]:
    found = {}
    for part in text.split(","):
        name, given, value = part.partition("=")
        if not given:
            name, value = (name, "true") if name.strip() == _RESUMED else ("strategy", name)
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
