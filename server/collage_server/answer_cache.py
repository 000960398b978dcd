"""Encoded answers about runs, kept in memory until they are too many."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import Lock
from typing import Any, Final

import msgspec
from cachetools import LRUCache

from collage_monitor import wire

__all__ = ["AnswerCache"]


_ENTRY_BYTES: Final = 400
"""What an entry takes beside its answer: a digest, and its places in the cache's tables."""


class AnswerCache:
    """Encoded answers, the least recently used dropped beyond a number of bytes. Thread-safe.

    On a repeated request, a curve of 100,000 points costs a third, a heatmap of 2,000 a fifth, and a comparison of
    50 runs a fifteenth of the CPU without it.

    A key is anything that msgspec encodes. Its digest is kept: a run of many launches has a revision far larger
    than most answers.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._answers: LRUCache[bytes, bytes] = LRUCache(limit_bytes, getsizeof=_bytes)
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """Bytes of the answers in memory."""
        return int(self._answers.currsize)

    def encoded(self, key: object, make: Callable[[], Any]) -> msgspec.Raw:
        """The answer kept under `key`, else the one that `make` gives."""
        return self.get(key) or self.put(key, make())

    def get(self, key: object) -> msgspec.Raw | None:
        """The answer kept under `key`."""
        digest = _digest(key)
        with self._lock:
            kept = self._answers.get(digest)
        return None if kept is None else msgspec.Raw(kept)

    def put(self, key: object, answer: Any) -> msgspec.Raw:
        """Encode an answer and keep it, unless it exceeds the cache's size."""
        made, digest = wire.encode_json(answer), _digest(key)
        with self._lock:
            if _bytes(made) <= self._answers.maxsize:
                self._answers[digest] = made
        return msgspec.Raw(made)


def _bytes(made: bytes) -> int:
    return len(made) + _ENTRY_BYTES


def _digest(key: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(key), digest_size=16).digest()
