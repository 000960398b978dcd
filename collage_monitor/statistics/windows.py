"""Several steps at once: the sum of their intended updates against what the weights have really moved by."""

from __future__ import annotations

import numpy as np

from collage_monitor.definitions import Array, Definition, Metric, Statistic, ratio

__all__ = ["DEFINITION"]


def _window(name: str, unit: str, text: str) -> Statistic:
    return Statistic(name, "sum", "last", unit, text, "steps", ("intended",))


def _cosine(product: Array, squares: Array, others: Array) -> Array:
    return ratio(product, np.sqrt(squares) * np.sqrt(others))


DEFINITION = Definition(
    statistics=(
        _window("window_intended_squared_sum", "weight²", "Σ U², U = Σ u over the window's steps."),
        _window("window_intended_effective_sum", "weight²", "Σ U·E, E = θ now − θ at the window's start."),
        _window("window_effective_squared_sum", "weight²", "Σ E²"),
        _window("window_intended_visible_sum", "weight²", "Σ U·Eᵛ"),
        _window("window_visible_squared_sum", "weight²", "Σ Eᵛ²"),
        _window("window_active", "elements", "Elements with U ≠ 0."),
        _window("window_lost", "elements", "U ≠ 0 and E = 0."),
        _window("window_lost_visible", "elements", "U ≠ 0 and Eᵛ = 0."),
    ),
    metrics=(
        Metric(
            "edq_window_ratio",
            "EDQ over a window",
            "ratio",
            "Σ U·E / Σ U², U = Σ u and E = the change of θ over k steps",
            "As edq_ratio, for k steps together. Hardly depends on k: one step forecasts it.",
            needs=("window_intended_effective_sum", "window_intended_squared_sum"),
            finish=ratio,
            label="steps",
            ideal=1.0,
        ),
        Metric(
            "edq_window_cosine",
            "EDQ cosine over a window",
            "ratio",
            "Σ U·E / √(Σ U² · Σ E²)",
            "Direction over k steps: nears 1 with k where errors even out, as stochastic rounding's do.",
            needs=(
                "window_intended_effective_sum",
                "window_intended_squared_sum",
                "window_effective_squared_sum",
            ),
            finish=_cosine,
            label="steps",
            ideal=1.0,
        ),
        Metric(
            "lost_window_ratio",
            "Updates lost over a window",
            "ratio",
            "window_lost / window_active",
            "Share of the updates intended over k steps that left the stored weight where it was. "
            "Judges stochastic rounding, which one step misjudges.",
            needs=("window_lost", "window_active"),
            finish=ratio,
            label="steps",
            ideal=0.0,
        ),
        Metric(
            "edq_visible_window_ratio",
            "EDQ over a window, visible",
            "ratio",
            "Σ U·Eᵛ / Σ U²",
            "The same for the registered parameter.",
            needs=("window_intended_visible_sum", "window_intended_squared_sum"),
            finish=ratio,
            label="steps",
            ideal=1.0,
        ),
        Metric(
            "edq_visible_window_cosine",
            "EDQ cosine over a window, visible",
            "ratio",
            "Σ U·Eᵛ / √(Σ U² · Σ Eᵛ²)",
            "Direction over k steps of the registered parameter.",
            needs=("window_intended_visible_sum", "window_intended_squared_sum", "window_visible_squared_sum"),
            finish=_cosine,
            label="steps",
            ideal=1.0,
        ),
        Metric(
            "lost_visible_window_ratio",
            "Updates lost over a window, visible",
            "ratio",
            "window_lost_visible / window_active",
            "Share of the updates intended over k steps that did not move the registered parameter. "
            "Judges Kahan's, which one step misjudges.",
            needs=("window_lost_visible", "window_active"),
            finish=ratio,
            label="steps",
            ideal=0.0,
        ),
    ),
)
