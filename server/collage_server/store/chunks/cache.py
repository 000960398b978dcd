"""Kept in memory: which chunks runs have, and their coarse columns. Every curve of a run reads the same few.

A column is known by what the reader's snapshot says of its chunks: sealing a late part or dropping a level changes
that, and what was kept is not found any more.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import fields, replace
from threading import Lock
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from collage_server.store.chunks.directory import Directories
from collage_server.store.chunks.pieces import Piece

__all__ = ["ChunkCache"]


class ChunkCache:
    """Pieces of runs with the columns read so far; the least recently used dropped beyond a number of bytes.

    `directories` keeps up to so many chunks.
    """

    def __init__(self, limit_bytes: int, chunks: int) -> None:
        self.directories = Directories(chunks)
        self._pieces: LRUCache[Hashable, Piece] = LRUCache(limit_bytes, getsizeof=_bytes)
        self._lock = Lock()

    def known(self, place: Hashable, totals: Collection[str], metric: str | None) -> Piece | None:
        """The piece kept for a place, if it has these totals, and the metric's extremes (None: of none)."""
        with self._lock:
            piece = self._pieces.get(place)
            if piece is None or not piece.totals.keys() >= set(totals):
                return None
            if metric is not None and metric not in piece.extremes:
                return None
        chosen = {} if metric is None else {metric: piece.extremes[metric]}
        return replace(piece, totals={key: piece.totals[key] for key in totals}, extremes=chosen)

    def keep(self, place: Hashable, piece: Piece) -> None:
        """Keep a copy of the piece's columns beside those that are kept for the place already."""
        own = _copied(piece)
        with self._lock:
            old = self._pieces.pop(place, None)
            if old is not None:
                own = replace(own, totals=old.totals | own.totals, extremes=old.extremes | own.extremes)
            if _bytes(own) <= self._pieces.maxsize:
                self._pieces[place] = own


def _copied(piece: Piece) -> Piece:
    """Arrays of their own, that nobody can write to."""
    arrays = {field.name: getattr(piece, field.name) for field in fields(piece)}
    counted = {name: _frozen(array) for name, array in arrays.items() if isinstance(array, np.ndarray)}
    totals = {key: _frozen(array) for key, array in piece.totals.items()}
    extremes = {key: (_frozen(low), _frozen(high)) for key, (low, high) in piece.extremes.items()}
    return Piece(attempt=piece.attempt, **counted, totals=totals, extremes=extremes)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    own = array.copy()
    own.flags.writeable = False
    return own


def _bytes(piece: Piece) -> int:
    return 8 * len(piece.steps) * (5 + len(piece.totals) + 2 * len(piece.extremes))
