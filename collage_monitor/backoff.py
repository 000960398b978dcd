"""How long to wait before another try: the one back-off of everything that talks to a server."""

from __future__ import annotations

import random

__all__ = ["Backoff"]

_LONGEST_ASKED_SECONDS = 300.0


class Backoff:
    """Pauses that double from `first` to `longest` seconds, with jitter; `reset` after a success."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._next = first
        # A generator of its own: a training's random numbers must come out as they would without the agent.
        self._random = random.Random()

    def pause(self, asked_seconds: float | None = None) -> float:
        """Seconds to wait now: at least what the server asked for, up to five minutes."""
        pause = self._next * self._random.uniform(0.5, 1.0)
        self._next = min(2 * self._next, self._longest)
        return max(pause, min(asked_seconds or 0.0, _LONGEST_ASKED_SECONDS))

    def slow_down(self) -> None:
        """Wait for the longest pause next: another try within seconds would not help."""
        self._next = self._longest

    def reset(self) -> None:
        """Begin with the first pause again."""
        self._next = self._first
