"""Effective descent quality: how much of the intended update u arrives in the stored weight. arXiv 2405.03637."""

from __future__ import annotations

import numpy as np

from collage_monitor.definitions import Array, Definition, Interval, Metric, ratio, sums

__all__ = ["DEFINITION"]


def _edq(product: Array, squares: Array, steps: Array) -> Array:
    return ratio(product, np.sqrt(squares * steps))


def _cosine(product: Array, squares: Array, others: Array) -> Array:
    return ratio(product, np.sqrt(squares) * np.sqrt(others))


DEFINITION = Definition(
    statistics=(
        *sums(
            "weight²",
            needs=("intended",),
            intended_squared_sum="Σ u²",
            intended_effective_sum="Σ u·e",
            intended_visible_sum="Σ u·eᵛ",
        ),
        *sums("weight²", effective_squared_sum="Σ e²", visible_squared_sum="Σ eᵛ²"),
    ),
    metrics=(
        Metric(
            "edq_ratio",
            "EDQ",
            "ratio",
            "Σ u·e / Σ u²",
            "Share of the intended descent that arrived: 1 all, 0 none, above 1 overshoot, below 0 the wrong way. "
            "Blind to errors already in the optimizer state: read it beside state_decrement_ratio or the oracle.",
            needs=("intended_effective_sum", "intended_squared_sum"),
            finish=ratio,
            ideal=1.0,
            interval=Interval("intended_effective_sum", "intended_squared_sum"),
            exposed=True,
        ),
        Metric(
            "edq",
            "EDQ, weight units",
            "weight",
            "Σ u·e / √(Σ u² · measured_steps)",
            "The paper's effective descent quality: length of the effective update along the intended one.",
            needs=("intended_effective_sum", "intended_squared_sum", "measured_steps"),
            finish=_edq,
        ),
        Metric(
            "edq_cosine",
            "EDQ cosine",
            "ratio",
            "Σ u·e / √(Σ u² · Σ e²)",
            "Direction of the effective update against the intended one.",
            needs=("intended_effective_sum", "intended_squared_sum", "effective_squared_sum"),
            finish=_cosine,
            ideal=1.0,
        ),
        Metric(
            "edq_visible_ratio",
            "EDQ, visible",
            "ratio",
            "Σ u·eᵛ / Σ u²",
            "The same for the registered parameter: what the forward pass sees.",
            needs=("intended_visible_sum", "intended_squared_sum"),
            finish=ratio,
            ideal=1.0,
            interval=Interval("intended_visible_sum", "intended_squared_sum"),
            exposed=True,
        ),
    ),
)
