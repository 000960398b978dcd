"""95 % intervals of ratio estimators: the block is the unit, variances come merged from the shards.

Ratios: linearised variance (V_AA − 2R·V_AB + R²·V_BB) / B². Shares: Wilson's interval with the effective sample
size, so that zero losses do not give zero width. Both with Student's quantile for as many blocks as there are in
effect: the normal one covers 0.92 with 32 blocks. Source: Cochran, Sampling Techniques, chapters 6 and 9; Wilson,
JASA 22 (1927); Abramowitz and Stegun, 26.7.5.

A ratio of sums of squares has tails. If few blocks hold most of Σ u² or most of the variance, or whole gradients
show that the sample missed large values, no width can be trusted, and no interval is given.

`finish.py` calls `needed_for` and `bounds`, `seeds.py` `student_quantile`; the sums are made by the agent's
`stats/intervals.py`. Names are fixed; limits may change only if coverage holds (`tests/contract/test_intervals.py`,
`tests/agent/test_laws.py`, `test_coverage.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from collage_monitor.definitions import Array, Definition, Interval, Statistic, active_elements, sums

__all__ = ["DEFINITION", "MINIMUM_BLOCKS", "MOST_UNSEEN", "bounds", "needed_for", "student_quantile"]

Totals = Mapping[str, Array]

_ACTIVE: Final = ("elements", "nonfinite", "idle", "lost", "distorted", "faithful")
"""What the denominator "active" is made of: the arguments of `active_elements`."""
MINIMUM_BLOCKS: Final = 20
_VARIANCES: Final = ("variance_numerator", "variance_denominator", "covariance", "variance_product_root")
_REFERENCE: Final = "variance_denominator/edq_ratio"
"""The variance of Σ u² on the sample that `unseen_variance` is about."""
_NORMAL_QUANTILE = 1.959963984540054
_FEWEST_DEGREES = 4.0
_FEW_DEGREES: Final = {1: 12.706204736, 2: 4.302652730, 3: 3.182446305}
"""Student's quantile where its expansion is too far off."""
_FEWEST_IN_EFFECT: Final = 10.0
_FEWEST_SOURCES: Final = 4.0
"""Blocks in effect that a ratio's denominator and its variance must come from, for Student's quantile to cover."""
MOST_UNSEEN: Final = 2.25
"""Standard errors of the denominator that the sample may be off by, where whole tensors were looked at. A
single element that is known to be missing counts several times: the agent weighs it."""


def _variance(name: str, text: str) -> Statistic:
    return Statistic(name, "sum", "root_sum", "metric's²", text, "metric", ("intended",))


DEFINITION = Definition(
    statistics=(
        _variance("variance_numerator", "Variance of a ratio's estimated numerator."),
        _variance("variance_denominator", "Variance of its estimated denominator."),
        *sums(
            "metric's²",
            needs=("intended",),
            label="metric",
            covariance="Covariance of the two.",
            variance_product_root="√(V_AA·V_BB) of each step, made after shards merged.",
        ),
        Statistic(
            "fourth_moment",
            "sum",
            "fourth_root_sum",
            "metric's⁴",
            "Σ f²·d⁴ over blocks, d = a − R·b: tells from how many blocks a ratio's variance comes.",
            "metric",
            ("intended",),
        ),
        Statistic(
            "unseen_variance",
            "sum",
            "root_sum",
            "weight⁴",
            "Square of what the sample's Σ u² may be off by, as whole gradients and momenta tell it.",
            needs=("intended",),
            raw=True,
        ),
    )
)


def needed_for(name: str, pair: Interval) -> list[str]:
    """Keys of the totals that `bounds` reads of the metric `name`."""
    variances = [f"{entry}/{name}" for entry in _VARIANCES]
    under = _ACTIVE if pair.denominator == "active" else (pair.denominator,)
    own = ("measured_steps",) if pair.share else (f"fourth_moment/{name}", "unseen_variance", _REFERENCE)
    return [pair.numerator, *under, *variances, *pair.sample, *own]


def _denominator(totals: Totals, name: str) -> Array:
    if name == "active":
        return active_elements(*(totals.get(part, np.asarray(np.nan)) for part in _ACTIVE))
    return totals[name]


def bounds(name: str, pair: Interval, totals: Totals) -> tuple[Array, Array]:
    """(low, high) of the 95 % interval of the metric `name`, the ratio `pair`; NaN where it is undefined.

    Undefined: a zero denominator, variances not reported, or fewer than MINIMUM_BLOCKS sampled blocks with
    u ≠ 0 unless every element was measured, where the width is zero; and ratios whose sums have too heavy tails.
    """
    a, b = totals[pair.numerator], _denominator(totals, pair.denominator)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(b == 0, np.nan, a / b)
        variance = _ratio_variance(name, totals, ratio, b)
        sampled, elements, blocks = (totals[part] for part in pair.sample)
        whole = sampled == elements
        effective = _blocks_in_effect(name, totals, b, sampled / elements, blocks)
        enough = blocks >= MINIMUM_BLOCKS
        if pair.share:
            quantile = _quantile(effective)
            # Each step samples the same elements, so n_eff is at most that of one step.
            active = sampled * b / elements / totals.get("measured_steps", np.float64(1.0))
            low, high = _wilson(ratio, variance, sampled / elements, active, blocks, quantile)
        else:
            # Earlier agents report neither moment: their intervals are those of sums without heavy tails.
            sources = np.square(variance * b**2) / totals.get(f"fourth_moment/{name}", np.float64(0.0))
            enough &= (effective >= _FEWEST_IN_EFFECT) & (sources >= _FEWEST_SOURCES)
            if "unseen_variance" in totals:
                enough &= totals["unseen_variance"] <= MOST_UNSEEN**2 * totals[_REFERENCE]
            half = _quantile(np.minimum(effective, sources)) * np.sqrt(variance)
            low, high = ratio - half, ratio + half
    known = np.isfinite(ratio) & (whole | (enough & np.isfinite(variance)))
    return (
        np.where(known, np.where(whole, ratio, low), np.nan),
        np.where(known, np.where(whole, ratio, high), np.nan),
    )


def _ratio_variance(name: str, totals: Totals, ratio: Array, b: Array) -> Array:
    v_aa = totals[f"variance_numerator/{name}"]
    v_bb = totals[f"variance_denominator/{name}"]
    covariance = totals[f"covariance/{name}"]
    roots = totals.get(f"variance_product_root/{name}")
    scale = np.sqrt(v_aa * v_bb)
    correlated = covariance if roots is None else np.where(roots > 0, scale * covariance / roots, 0.0)
    return np.maximum(v_aa - 2 * ratio * correlated + ratio**2 * v_bb, 0.0) / b**2


def _blocks_in_effect(name: str, totals: Totals, b: Array, fraction: Array, blocks: Array) -> Array:
    """n / (1 + cv²) with cv the spread of the denominator over the n blocks.

    The effective number is smaller if most of the denominator is in a few blocks, as with rarely used rows.
    """
    spread = totals[f"variance_denominator/{name}"] / (b**2 * np.maximum(1.0 - fraction, np.finfo(np.float64).tiny))
    found: Array = 1.0 / (1.0 / blocks + np.nan_to_num(spread))
    return found


def _quantile(blocks: Array) -> Array:
    """Student's 97.5 % quantile for so many blocks in effect, of degrees of freedom one less."""
    return student_quantile(np.maximum(blocks - 1.0, _FEWEST_DEGREES))


def student_quantile(degrees: Array | float) -> Array:
    """Student's 97.5 % quantile for so many degrees of freedom, 1 or more.

    From the normal one by its expansion in 1 / degrees, within 0.003 from 5 on; whole numbers below 4 exactly.
    """
    freedom = np.asarray(degrees, np.float64)
    z = _NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    quantile: Array = z + first / freedom + second / freedom**2 + third / freedom**3
    return np.select([freedom == few for few in _FEW_DEGREES], list(_FEW_DEGREES.values()), quantile)


def _wilson(
    share: Array, variance: Array, fraction: Array, active_sampled: Array, blocks: Array, quantile: Array
) -> tuple[Array, Array]:
    """Wilson's interval with n_eff = p(1 − p) / V, never above the sampled elements that were not idle.

    At p = 0 or 1 the blocks cannot tell the design effect: a block then counts as one element. Both bounds on
    n_eff carry the finite-population correction 1 − n/N, as V already does.
    """
    unseen = np.maximum(1.0 - fraction, np.finfo(np.float64).tiny)
    spread = share * (1.0 - share)
    size = np.where(spread > 0, np.minimum(spread / variance, active_sampled / unseen), blocks / unseen)
    z2 = quantile**2 / size
    middle = (share + z2 / 2) / (1 + z2)
    half = np.sqrt(z2 * (spread + z2 / 4)) / (1 + z2)
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)
