"""Element by element, in exact fractions and plain Python: what the diagnostics add up on the device."""

import math
from fractions import Fraction

import numpy as np
import torch

from tests.reference.expansions import LAYOUTS, Layout

OCTAVES = range(-24, 8)


def exact(values) -> list[Fraction | None]:
    """Each element as a fraction, None where it is not finite."""
    return [Fraction(x) if math.isfinite(x) else None for x in torch.as_tensor(values).double().tolist()]


def classes(theta, gradient, u, e, visible) -> dict[str, int]:
    """Counts by class of lists of fractions (None: not finite)."""
    names = ["nonfinite", "idle", "stray", "lost", "distorted", "reversed", "faithful", "lost_visible", "unchanged"]
    counts = dict.fromkeys([*names, "nonfinite_gradients"], 0)
    for t, g, ui, ei, vi in zip(theta, gradient, u, e, visible, strict=True):
        counts["nonfinite_gradients"] += g is None
        if None in (t, g, ui, ei, vi):
            counts["nonfinite"] += 1
            continue
        counts["unchanged"] += vi == 0
        if ui == 0:
            counts["idle"] += 1
            counts["stray"] += ei != 0
            continue
        counts["lost_visible"] += vi == 0
        if ei == 0:
            counts["lost"] += 1
        elif 2 * abs(ei - ui) > abs(ui):
            counts["distorted"] += 1
            counts["reversed"] += ei * ui < 0
        else:
            counts["faithful"] += 1
    return counts


def neighbour_gap(value: float, upwards: bool, dtype: torch.dtype) -> Fraction:
    """Distance from `value` to the next number of `dtype` above or below, from bit patterns (bf16, fp16, fp32)."""
    integer, mask = (torch.int32, 0x7FFFFFFF) if dtype == torch.float32 else (torch.int16, 0x7FFF)
    bits = int(torch.tensor(value, dtype=dtype).view(integer).item())
    magnitude = bits & mask
    away = (value >= 0) == upwards
    step = magnitude + 1 if away or magnitude == 0 else magnitude - 1
    other = torch.tensor(step, dtype=integer).view(dtype).double().item()
    here = torch.tensor(magnitude, dtype=integer).view(dtype).double().item()
    if not math.isfinite(other):
        below = torch.tensor(magnitude - 1, dtype=integer).view(dtype).double().item()
        return Fraction(here) - Fraction(below)
    return abs(Fraction(other) - (Fraction(here) if magnitude else 0))


def octave_counts(u, values, dtype: torch.dtype) -> list[int]:
    """Histogram of |u| / gap in the order underflow, −24 … 7, overflow; u = 0 is left out."""
    counts = [0] * (len(OCTAVES) + 2)
    for ui, value in zip(u, values, strict=True):
        if ui == 0:
            continue
        ratio = abs(ui) / neighbour_gap(value, ui > 0, dtype)
        octave = _floor_log2(ratio)
        counts[min(max(octave - OCTAVES[0] + 1, 0), len(counts) - 1)] += 1
    return counts


def _floor_log2(x: Fraction) -> int:
    k = x.numerator.bit_length() - x.denominator.bit_length()
    return k if Fraction(2) ** k <= x else k - 1


def decrements(before, intended, observed) -> tuple[Fraction, Fraction]:
    """(observed, intended) Σ (|s after| − |s before|) over elements whose |s| should shrink."""
    return _moved(before, intended, observed, lambda wanted: wanted < 0)


def increments(before, intended, observed) -> tuple[Fraction, Fraction]:
    """(observed, intended) Σ (|s after| − |s before|) over elements whose |s| should grow."""
    return _moved(before, intended, observed, lambda wanted: wanted > 0)


def _moved(before, intended, observed, counts) -> tuple[Fraction, Fraction]:
    moves = [
        (abs(o) - abs(b), abs(i) - abs(b))
        for b, i, o in zip(before, intended, observed, strict=True)
        if None not in (b, i) and counts(abs(i) - abs(b))
    ]
    return total(seen for seen, _ in moves), total(wanted for _, wanted in moves)


def total(products) -> Fraction:
    return sum((x for x in products), Fraction(0))


def variances(a, b, population: int) -> tuple[float, float, float]:
    """N²(1 − n/N)/n · (s_AA, s_BB, s_AB) of block totals a and b."""
    n = len(a)
    factor = population**2 * (1 - n / population) / n
    covariance = np.cov(np.array(a, dtype=np.float64), np.array(b, dtype=np.float64), ddof=1)
    return factor * covariance[0, 0], factor * covariance[1, 1], factor * covariance[0, 1]


def decay(values, rate: float, layout) -> tuple[Fraction, Fraction]:
    """Σ d·d̂ and Σ d² of decoupled decay by `rate`, of values in the format of `layout`; 1 − rate is a double."""
    kept = intended = Fraction(0)
    for value in values:
        wanted = -Fraction(rate) * value
        kept += wanted * (layout.round(value * Fraction(1 - rate)) - value)
        intended += wanted * wanted
    return kept, intended


def residuals(residual, values, dtype: torch.dtype) -> tuple[int, Fraction, list[int]]:
    """Zeros, Σ |r| / ½gap(θᵛ) with the gap in r's direction, and the histogram of r ≠ 0 in octaves of that."""
    zero, fill = 0, Fraction(0)
    for r, value in zip(residual, values, strict=True):
        zero += r == 0
        fill += 2 * abs(r) / neighbour_gap(value, r > 0, dtype)
    doubled = [2 * r for r in residual]
    return zero, fill, octave_counts(doubled, values, dtype)


def zeros(gradient, state) -> tuple[int, int]:
    """Elements with g ≠ 0, and those of them whose state is 0."""
    wanted = [s for g, s in zip(gradient, state, strict=True) if g is not None and g != 0]
    return len(wanted), sum(s == 0 for s in wanted)


def window(updates, before, after) -> dict[str, Fraction | int]:
    """Totals of one window and one weight: lists of u by step, and the weights at its two ends, all fractions."""
    together = [sum(steps, Fraction(0)) for steps in zip(*updates, strict=True)]
    moved = [b - a for a, b in zip(before, after, strict=True)]
    pairs = list(zip(together, moved, strict=True))
    return {
        "intended_squared": total(u * u for u, _ in pairs),
        "product": total(u * e for u, e in pairs),
        "effective_squared": total(e * e for _, e in pairs),
        "active": sum(u != 0 for u, _ in pairs),
        "lost": sum(u != 0 and e == 0 for u, e in pairs),
    }


class E4M3(Layout):
    """float8_e4m3fn: no infinity, so that the largest number is 448."""

    largest = Fraction(448)


def counterfactuals(theta, u, scale: Fraction) -> dict[str, Fraction]:
    """Σ u·e of each method and the variance of stochastic rounding, of lists of fractions; fp8 by `scale`."""
    bf16, fp8 = LAYOUTS["bfloat16"], E4M3(4, 3)
    sums = dict.fromkeys(("squared", "plain", "light", "stochastic", "fp8", "variance"), Fraction(0))

    def eight(value):
        return scale * fp8.round(min(max(value / scale, Fraction(-448)), Fraction(448)))

    for t, x in zip(theta, u, strict=True):
        start = bf16.round(t)
        low = bf16.round(t - start)
        exact = start + low + x
        high = bf16.round(exact)
        sums["squared"] += x * x
        sums["plain"] += x * (bf16.round(start + x) - start)
        sums["light"] += x * (high + bf16.round(exact - high) - start - low)
        sums["stochastic"] += x * x
        sums["fp8"] += x * (eight(eight(t) + x) - eight(t))
        below, above = neighbours(bf16, start + x)
        sums["variance"] += (start + x - below) * (above - start - x)
    return sums


def neighbours(layout, value: Fraction) -> tuple[Fraction, Fraction]:
    """The numbers of a format next below and above a value, both the value itself where it is one of them."""
    unit = Fraction(2) ** layout.exponent_of_ulp(value)
    below = math.floor(value / unit) * unit
    return below, below if below == value else below + unit
