"""Means and differences over seeds: exact fractions, and Student's quantile by integrating its density."""

import math
from fractions import Fraction

import numpy as np


def student_quantile(degrees):
    """The 97.5 % quantile: bisected on the integral of the density, Simpson's rule with 4,000 pieces."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def below(x):
        places = np.linspace(0.0, x, 4001)
        heights = scale * (1 + places**2 / degrees) ** (-(degrees + 1) / 2)
        weights = np.ones(4001)
        weights[1:-1:2], weights[2:-1:2] = 4, 2
        return 0.5 + x / 12000 * float(weights @ heights)

    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.975 else (low, middle)
    return low


def mean(values):
    """(mean, half of the 95 % interval, standard deviation)."""
    exact = [Fraction(value) for value in values]
    middle = sum(exact) / len(exact)
    variance = sum((value - middle) ** 2 for value in exact) / (len(exact) - 1)
    half = student_quantile(len(exact) - 1) * math.sqrt(variance / len(exact))
    return float(middle), half, math.sqrt(variance)


def welch(own, reference):
    """(difference of the means, half of its 95 % interval)."""
    parts, middles = [], []
    for values in (own, reference):
        exact = [Fraction(value) for value in values]
        middles.append(sum(exact) / len(exact))
        variance = sum((value - middles[-1]) ** 2 for value in exact) / (len(exact) - 1)
        parts.append((variance / len(exact), len(exact) - 1))
    whole = sum(part for part, _ in parts)
    degrees = whole**2 / sum(part**2 / free for part, free in parts)
    return float(middles[0] - middles[1]), student_quantile(math.floor(degrees)) * math.sqrt(whole)
