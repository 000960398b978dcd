"""Merging totals, first over shards (ranks, layers) within a step, then over steps, by the catalogue's rules.

NaN stands for "not reported" and never takes part; all parts NaN stay NaN. Each merge is associative and
commutative (`last` follows the order of the steps). Counts are exact up to 2**53.

The server merges by it at every level; the agent's `step_history.py` repeats the rules in torch. A changed rule
would change stored coarse levels (`tests/contract/test_merge.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from collage_monitor.statistics.catalogue import split_key, statistic

__all__ = [
    "Totals",
    "merge",
    "merge_shards",
    "merge_starts",
    "merge_steps",
    "reduce_shards",
    "reduce_steps",
    "with_variance_product_roots",
]

Array = NDArray[np.float64]
Totals = Mapping[str, Array]
"""Statistic key → float64 array of one common shape: a `Table`, or a plain mapping."""
_REDUCED_BY: Final[Mapping[str, tuple[np.ufunc, float]]] = {
    "sum": (np.add, 0.0),
    "root_sum": (np.add, 0.0),
    "fourth_root_sum": (np.add, 0.0),
    "max": (np.maximum, -np.inf),
    "min": (np.minimum, np.inf),
}
"""Merge rule → what reduces, and what stands for a part that is not reported."""
_ROOTS: Final[Mapping[str, int]] = {"root_sum": 2, "fourth_root_sum": 4}
"""Merge rule → the root that is added up, and then raised to its power again."""


def merge(parts: Sequence[Totals], *, over: Literal["shards", "steps"]) -> dict[str, Array]:
    """Merge equal-shaped totals over shards or over steps (in the order given)."""
    return merge_shards(parts) if over == "shards" else merge_steps(parts)


def merge_shards(parts: Sequence[Totals]) -> dict[str, Array]:
    """Merge the totals of a step's shards; a key that a part lacks counts as not reported."""
    return reduce_shards(_stack(parts), axis=0)


def merge_steps(parts: Sequence[Totals]) -> dict[str, Array]:
    """Totals of several steps, oldest first, from totals whose shards are already merged."""
    return reduce_steps(_stack(parts), axis=0)


def reduce_shards(totals: Totals, axis: int = 0) -> dict[str, Array]:
    """Merge over shards along `axis`, which disappears.

    `variance_product_root` is not additive over shards: it is made again from the merged variances,
    √(V_AA · V_BB), so that a later merge over steps can use it.
    """
    merged = {
        key: _reduce(values, statistic(key).over_shards, axis, None).squeeze(axis)
        for key, values in totals.items()
        if split_key(key)[0] != "variance_product_root"
    }
    return with_variance_product_roots(merged)


def reduce_steps(totals: Totals, axis: int = 0, starts: NDArray[np.intp] | None = None) -> dict[str, Array]:
    """Merge over steps along `axis`, oldest first.

    With `starts` (ascending indices into the axis) each range [starts[i], starts[i + 1]) becomes one point and
    the axis stays; without, everything becomes one point and the axis disappears.
    """
    lifted = with_variance_product_roots(totals)
    reduced = {key: _reduce(values, statistic(key).over_steps, axis, starts) for key, values in lifted.items()}
    return reduced if starts is not None else {key: values.squeeze(axis) for key, values in reduced.items()}


def with_variance_product_roots(totals: Totals) -> dict[str, Array]:
    """Add the missing `variance_product_root/…` wherever both variances are known.

    Totals of several steps have it; a point without it (NaN) is a single step.
    """
    result = dict(totals)
    for key, values in totals.items():
        name, label = split_key(key)
        denominator = totals.get(f"variance_denominator/{label}")
        if name != "variance_numerator" or denominator is None:
            continue
        root = f"variance_product_root/{label}"
        single = np.sqrt(np.maximum(values, 0.0)) * np.sqrt(np.maximum(denominator, 0.0))
        known = totals.get(root)
        result[root] = single if known is None else np.where(np.isnan(known), single, known)
    return result


def _stack(parts: Sequence[Totals]) -> dict[str, Array]:
    if not parts:
        raise ValueError("nothing to merge: pass at least one part")
    keys = dict.fromkeys(key for part in parts for key in part)
    shape = next((np.shape(values) for part in parts for values in part.values()), ())
    missing = np.full(shape, np.nan)
    return {key: np.stack([np.asarray(part.get(key, missing), dtype=np.float64) for part in parts]) for key in keys}


def _reduce(values: Array, rule: str, axis: int, starts: NDArray[np.intp] | None) -> Array:
    bounds = np.zeros(1, dtype=np.intp) if starts is None else starts
    missing = np.isnan(values)
    if rule == "last":
        return _last(values, missing, bounds, axis)
    gaps = bool(missing.any())
    ufunc, neutral = _REDUCED_BY[rule]
    given = np.where(missing, neutral, values) if gaps else values
    if rule in _ROOTS:
        roots = np.power(np.maximum(given, 0.0), 1 / _ROOTS[rule])
        merged: Array = np.power(ufunc.reduceat(roots, bounds, axis=axis), _ROOTS[rule])
    else:
        merged = ufunc.reduceat(given, bounds, axis=axis)
    if gaps:
        merged[np.logical_and.reduceat(missing, bounds, axis=axis)] = np.nan
    return merged


def _last(values: Array, missing: NDArray[np.bool_], bounds: NDArray[np.intp], axis: int) -> Array:
    shape = [1] * values.ndim
    shape[axis] = values.shape[axis]
    order = np.arange(values.shape[axis]).reshape(shape)
    newest = np.maximum.reduceat(np.where(missing, -1, order), bounds, axis=axis)
    picked = np.take_along_axis(values, np.maximum(newest, 0), axis=axis)
    return np.where(newest < 0, np.nan, picked)


def _merge_width(counts: NDArray[np.int64], points: int) -> int:
    """Measured steps in each merged point, so that there are at most `points`."""
    size = max(-(-int(counts.sum()) // points), 1)
    # Frozen points are coarser than requested: each stays one point and does not coarsen the others.
    coarsest = int(counts[counts <= 2 * size].max(initial=1))
    return -(-size // coarsest) * coarsest


def merge_starts(counts: NDArray[np.int64], points: int) -> NDArray[np.intp]:
    """Where each of at most `points` merged points begins: all hold equally many steps, the last maybe fewer.

    `counts` says how many measured steps each point merges already; points are never split. Merging twice gives the
    same points as merging once.
    """
    if not len(counts):
        return np.zeros(0, dtype=np.intp)
    before = np.cumsum(counts) - counts
    merged = before // _merge_width(counts, points)
    return np.append(0, np.flatnonzero(merged[1:] != merged[:-1]) + 1)
