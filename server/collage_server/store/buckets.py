"""How the points of a run are put into the buckets of an answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["bucket_starts", "bucket_width"]


def bucket_width(counts: NDArray[np.int64], points: int) -> int:
    """How many measured points each of at most `points` buckets holds; those of `bucket_starts`."""
    size = max(-(-int(counts.sum()) // points), 1)
    # Frozen points are far coarser than asked: each is a bucket, and does not coarsen the others.
    coarsest = int(counts[counts <= 2 * size].max(initial=1))
    return -(-size // coarsest) * coarsest


def bucket_starts(counts: NDArray[np.int64], points: int) -> NDArray[np.intp]:
    """First indices of at most `points` buckets of equally many measured points each; the last may be shorter.

    `counts` says how many measured points each point merges already; a bucket holds whole points only. Where all
    points of a bucket are merged to one, the buckets stay the same.
    """
    if not len(counts):
        return np.zeros(0, dtype=np.intp)
    before = np.cumsum(counts) - counts
    bucket = before // bucket_width(counts, points)
    return np.append(0, np.flatnonzero(bucket[1:] != bucket[:-1]) + 1)
