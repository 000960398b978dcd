"""Effective descent quality, how much of the intended update u arrives in the stored weight, and the norms.

Collage, arXiv 2405.03637.

The agent measures it in `collage_agent/stats/edq.py`; formulas are those of `docs/metrics.md`, and names are fixed:
chunks, alerts and exports go by them.
"""

from __future__ import annotations

import numpy as np

from collage_monitor.definitions import (
    Array,
    Definition,
    Interval,
    Metric,
    Statistic,
    cosine,
    noise_ratio,
    ratio,
    root_ratio,
    rounding_variance,
    sums,
)

__all__ = ["EDQ", "NORMS"]


def _edq(product: Array, squares: Array, steps: Array) -> Array:
    return ratio(product, np.sqrt(squares * steps))


def _with_u(effective: Array, without_u: Array) -> Array:
    """Σ e² of the tensors whose u is known."""
    return np.maximum(effective - np.nan_to_num(without_u), 0.0)


def _cosine(product: Array, squares: Array, others: Array, without_u: Array) -> Array:
    return cosine(product, squares, _with_u(others, without_u))


def _error(product: Array, squares: Array, others: Array, without_u: Array) -> Array:
    # Σ (e − u)², which rounding may leave a little below 0.
    return root_ratio(np.maximum(_with_u(others, without_u) - 2 * product + squares, 0.0), squares)


EDQ = Definition(
    statistics=(
        *sums(
            "weight²",
            needs=("intended",),
            intended_squared_sum="Σ u²",
            intended_effective_sum="Σ u·e",
            intended_visible_sum="Σ u·eᵛ",
        ),
        rounding_variance("rounding_variance", "weight⁴", "u·e", "u²"),
        *sums(
            "weight²",
            effective_squared_sum="Σ e²",
            visible_squared_sum="Σ eᵛ²",
            effective_squared_sum_without_u="Σ e² of tensors whose u is not known: it enters no ratio to u.",
        ),
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
            optional=("effective_squared_sum_without_u",),
            finish=_cosine,
            ideal=1.0,
        ),
        Metric(
            "edq_noise_ratio",
            "EDQ, noise of rounding",
            "ratio",
            "√rounding_variance / Σ u²",
            "Standard error of edq_ratio where rounding is random: what chance takes or adds in these steps. Says "
            "nothing of rounding to nearest, whose errors are no chance.",
            needs=("rounding_variance", "intended_squared_sum"),
            finish=noise_ratio,
            ideal=0.0,
        ),
        Metric(
            "update_error_ratio",
            "Update error",
            "ratio",
            "√(Σ (e − u)² / Σ u²)",
            "What rounding took and added, beside what was intended: 0 nothing, 1 as much as standing still. In it "
            "an overshoot does not make up for a loss, as it does in edq_ratio. Stochastic rounding adds noise to "
            "it that evens out.",
            needs=("intended_effective_sum", "intended_squared_sum", "effective_squared_sum"),
            optional=("effective_squared_sum_without_u",),
            finish=_error,
            ideal=0.0,
        ),
        Metric(
            "edq_visible_ratio",
            "EDQ, visible",
            "ratio",
            "Σ u·eᵛ / Σ u²",
            "As edq_ratio, for the registered parameter: what the forward pass sees.",
            needs=("intended_visible_sum", "intended_squared_sum"),
            finish=ratio,
            ideal=1.0,
            interval=Interval("intended_visible_sum", "intended_squared_sum"),
            exposed=True,
        ),
    ),
)


def _update_to_weight(update: Array, steps: Array, weight: Array) -> Array:
    return ratio(root_ratio(update, steps), np.sqrt(weight))


NORMS = Definition(
    statistics=(
        *sums("gradient²", needs=("gradient",), gradient_squared_sum="Σ g²"),
        Statistic("parameter_squared_sum", "sum", "last", "weight²", "Σ θ² before the step."),
    ),
    metrics=(
        Metric(
            "grad_norm",
            "Gradient norm",
            "gradient",
            "√(Σ g² / measured_steps)",
            "After unscaling and clipping.",
            needs=("gradient_squared_sum", "measured_steps"),
            finish=root_ratio,
            exposed=True,
        ),
        Metric(
            "param_norm",
            "Weight norm",
            "weight",
            "√Σ θ²",
            "Before the step.",
            needs=("parameter_squared_sum",),
            finish=np.sqrt,
        ),
        Metric(
            "intended_norm",
            "Intended update norm",
            "weight",
            "√(Σ u² / measured_steps)",
            "L2 norm of u.",
            needs=("intended_squared_sum", "measured_steps"),
            finish=root_ratio,
        ),
        Metric(
            "effective_norm",
            "Effective update norm",
            "weight",
            "√(Σ e² / measured_steps)",
            "L2 norm of e.",
            needs=("effective_squared_sum", "measured_steps"),
            finish=root_ratio,
        ),
        Metric(
            "update_to_weight_ratio",
            "Update to weight",
            "ratio",
            "intended_norm / param_norm",
            "Size of an intended step beside the weights.",
            needs=("intended_squared_sum", "measured_steps", "parameter_squared_sum"),
            finish=_update_to_weight,
            exposed=True,
        ),
    ),
)
