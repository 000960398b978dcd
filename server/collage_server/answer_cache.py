"""Encoded answers about runs, kept in memory until they are too many."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import msgspec
from cachetools import LRUCache

from collage_monitor import wire

__all__ = ["AnswerCache"]


class AnswerCache:
    """Encoded answers, the least recently used dropped beyond a number of bytes. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._answers: LRUCache[Hashable, bytes] = LRUCache(limit_bytes, getsizeof=len)
        self._lock = Lock()

    def encoded(self, key: Hashable, make: Callable[[], Any]) -> msgspec.Raw:
        """The answer kept under `key`, else the one that `make` gives."""
        return self.known(key) or self.keep(key, make())

    def known(self, key: Hashable) -> msgspec.Raw | None:
        """The answer kept under `key`."""
        with self._lock:
            kept = self._answers.get(key)
        return None if kept is None else msgspec.Raw(kept)

    def keep(self, key: Hashable, answer: Any) -> msgspec.Raw:
        """Encode an answer and keep it, if it is not larger than all may be together."""
        made = wire.encode_json(answer)
        with self._lock:
            if len(made) <= self._answers.maxsize:
                self._answers[key] = made
        return msgspec.Raw(made)
