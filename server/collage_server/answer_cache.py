"""Encoded answers about runs, kept in memory until they are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import msgspec

from collage_monitor import wire

__all__ = ["AnswerCache"]


class AnswerCache:
    """Encoded answers, the least recently used dropped beyond a number of bytes. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._answers: OrderedDict[Hashable, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def encoded(self, key: Hashable, make: Callable[[], Any]) -> msgspec.Raw:
        """The answer kept under `key`, else the one that `make` gives."""
        return self.known(key) or self.keep(key, make())

    def known(self, key: Hashable) -> msgspec.Raw | None:
        """The answer kept under `key`."""
        with self._lock:
            kept = self._answers.get(key)
            if kept is None:
                return None
            self._answers.move_to_end(key)
            return msgspec.Raw(kept)

    def keep(self, key: Hashable, answer: Any) -> msgspec.Raw:
        """Encode an answer and keep it, if it is not larger than all may be together."""
        made = wire.encode_json(answer)
        with self._lock:
            if key not in self._answers and len(made) <= self._limit_bytes:
                self._answers[key] = made
                self._bytes += len(made)
                while self._bytes > self._limit_bytes:
                    self._bytes -= len(self._answers.popitem(last=False)[1])
        return msgspec.Raw(made)
