"""The one place where the agent's own errors end: logged once per kind, counted, never raised into training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

import torch

__all__ = ["Guard", "raise_in_tests", "reraise_in_tests"]

_FAILURES_ALLOWED: Final = 3
_MOST_REFUSALS: Final = 20
_LOGGER = logging.getLogger("collage_agent")
_raising = False
_Answer = TypeVar("_Answer")


def raise_in_tests(on: bool) -> None:
    """Let every guarded error through (True), as the test suite does, or swallow it again (False)."""
    global _raising
    _raising = on


def reraise_in_tests(error: Exception) -> None:
    """Raise an error that is about to be swallowed, under `raise_in_tests`."""
    if _raising:
        raise error


class Guard:
    """Swallows errors. With `stops_measuring` (a watch's guard), it also ends measuring after FAILURES_ALLOWED
    errors, or when memory runs out: then `disabled` is True.
    """

    def __init__(self, *, stops_measuring: bool = False) -> None:
        self._stops_measuring = stops_measuring
        self.failures: Counter[str] = Counter()
        self.disabled = False
        self.reason = ""
        """What failed last, and whether measuring goes on; empty while nothing has failed."""
        self._refused: set[str] = set()

    def caught(self, doing: str, error: Exception) -> None:
        """Handle an error that happened while `doing` something; re-raises it only in tests."""
        reraise_in_tests(error)
        kind = f"{doing}: {type(error).__name__}"
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            _LOGGER.warning("%s failed (%s); training is not affected", doing, error, exc_info=error)
        if self.disabled or not self._stops_measuring:
            return
        self.reason = f"measuring fails, last {kind}: {error}"
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if out_of_memory or self.failures.total() >= _FAILURES_ALLOWED:
            self.disabled = True
            self.reason = f"switched off after {self.failures.total()} failures, last {kind}: {error}"
            _LOGGER.error("measuring is %s", self.reason)

    def answer(self, call: str, ask: Callable[[], _Answer], unknown: _Answer) -> _Answer:
        """What `ask` returns; `unknown` if it raises, which is said once. Measuring goes on."""
        try:
            return ask()
        except Exception as error:
            self.refused(call, error)
            return unknown

    def refused(self, call: str, error: Exception) -> None:
        """A call cannot be answered, such as one with a value of no use: said once, and measuring goes on."""
        reraise_in_tests(error)
        if (told := str(error)) not in self._refused and len(self._refused) < _MOST_REFUSALS:
            self._refused.add(told)
            _LOGGER.warning("%s: this call is left out (%s); measuring goes on (said once)", call, told)
