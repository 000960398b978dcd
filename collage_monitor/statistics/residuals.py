"""Residuals of weights that are kept as a sum θᵛ + r: how full they are, how many are zero."""

from __future__ import annotations

from collage_monitor.definitions import Definition, Metric, Statistic, as_is, ratio

__all__ = ["DEFINITION"]


def _last(name: str, unit: str, text: str, label: str | None = None) -> Statistic:
    return Statistic(name, "sum", "last", unit, text, label)


DEFINITION = Definition(
    statistics=(
        _last("residual_elements", "elements", "Elements with a finite residual r, θ = θᵛ + r."),
        _last("residual_zero", "elements", "Elements whose residual is 0 before the step."),
        _last("residual_nonfinite", "elements", "Residuals that are NaN or infinite."),
        _last("residual_fill_sum", "1", "Σ |r| / ½gap(θᵛ)"),
        _last(
            "residual_fill_histogram",
            "elements",
            "Elements with r ≠ 0 by |r| / ½gap(θᵛ), the gap in r's direction, in octaves.",
            "octave",
        ),
    ),
    metrics=(
        Metric(
            "residual_fill_ratio",
            "Residual fill",
            "ratio",
            "residual_fill_sum / residual_elements",
            "Mean of |r| / ½gap(θᵛ), before the step, where the weight is kept as a sum θᵛ + r: "
            "about ½ in training.",
            needs=("residual_fill_sum", "residual_elements"),
            finish=ratio,
        ),
        Metric(
            "residual_zero_ratio",
            "Residual zero",
            "ratio",
            "residual_zero / residual_elements",
            "Share of the residuals that are 0 before the step. 1 is normal at the first step; a jump after a "
            "resume means a checkpoint that dropped them.",
            needs=("residual_zero", "residual_elements"),
            finish=ratio,
        ),
        Metric(
            "residual_nonfinite",
            "Residuals not finite",
            "elements",
            "residual_nonfinite",
            "Residuals that are NaN or infinite.",
            needs=("residual_nonfinite",),
            finish=as_is,
            ideal=0.0,
        ),
    ),
)
