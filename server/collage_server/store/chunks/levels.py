"""Coarse levels of a chunk: totals merged over measured points, with the extremes of the metrics on display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor.metrics import METRICS, split_key
from collage_monitor.statistics import finish, metric_keys, reduce_steps
from collage_server.store.chunks.blocks import maximum_key, minimum_key
from collage_server.store.chunks.pieces import Piece
from collage_server.store.contract import FloatArray

__all__ = ["coarsen", "has_layer_extremes", "layer_extremes", "model_extremes"]

_SHOWN_BY_LAYER: Final = frozenset(name for name, entry in METRICS.items() if entry.exposed or entry.interval)


def model_extremes(statistics: Sequence[str]) -> list[str]:
    """Metrics of the model whose extremes are kept: all that these statistics can make."""
    return metric_keys(statistics)


def layer_extremes(statistics: Sequence[str]) -> list[str]:
    """Metrics by layer whose extremes are kept: those on display; others are read at level 1."""
    return [key for key in metric_keys(statistics) if has_layer_extremes(key)]


def has_layer_extremes(key: str) -> bool:
    """Whether coarse points of layers keep this metric's extremes, as those of the model do of every metric."""
    return split_key(key)[0] in _SHOWN_BY_LAYER


def coarsen(piece: Piece, level: int, points: int, metrics: Sequence[str]) -> tuple[Piece, dict[str, FloatArray]]:
    """A whole chunk at a coarser level: each point merges `level` of the chunk's `points` measured ones.

    A late point in between makes the last one larger. Beside it everything to store: totals and extremes by entry.
    """
    starts = np.arange(0, points, level, dtype=np.intp)
    coarse = merged(piece, starts)
    stored = dict(coarse.totals)
    with np.errstate(divide="ignore", invalid="ignore"):
        for key in metrics:
            single = finish(key, piece.totals)
            stored[minimum_key(key)] = np.fmin.reduceat(single, starts, axis=0)
            stored[maximum_key(key)] = np.fmax.reduceat(single, starts, axis=0)
    return coarse, stored


def merged(piece: Piece, starts: NDArray[np.intp]) -> Piece:
    """Points merged over their steps: each from one of `starts` to the next."""
    ends = np.append(starts[1:], len(piece.steps)) - 1
    return Piece(
        attempt=piece.attempt,
        first_steps=piece.first_steps[starts],
        steps=piece.steps[ends],
        times=piece.times[ends],
        ranks=np.minimum.reduceat(piece.ranks, starts),
        counts=np.add.reduceat(piece.counts, starts),
        totals=reduce_steps(piece.totals, axis=0, starts=starts),
    )
