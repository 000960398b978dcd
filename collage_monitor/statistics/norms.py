"""Sizes: gradient, weight, intended and effective update in the L2 norm."""

from __future__ import annotations

import numpy as np

from collage_monitor.definitions import Array, Definition, Metric, Statistic, ratio, root_ratio, sums

__all__ = ["DEFINITION"]


def _update_to_weight(update: Array, steps: Array, weight: Array) -> Array:
    return ratio(root_ratio(update, steps), np.sqrt(weight))


DEFINITION = Definition(
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
