"""Several steps together: windows of steps, and the oracle.

A window compares the sum of its intended updates with what the weights have really moved by; the oracle, an fp64
optimizer with weights and states of its own, is fed the same gradients.

The agent measures it in `collage_agent/stats/several_steps.py`; formulas are those of `docs/metrics.md`, and names
are fixed (`tests/agent/stats/test_windows.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from collage_monitor.definitions import (
    Array,
    Definition,
    Interval,
    Metric,
    Statistic,
    as_is,
    cosine,
    noise_ratio,
    ratio,
    root_ratio,
    rounding_variance,
    sums,
)

__all__ = ["ORACLE", "WINDOWS"]


def _window(name: str, unit: str, text: str) -> Statistic:
    return Statistic(name, "sum", "last", unit, text, "steps", ("intended",))


def _ratio_over_window(
    name: str,
    title: str,
    formula: str,
    text: str,
    needs: tuple[str, ...],
    *,
    finish: Callable[..., Array] = ratio,
    ideal: float = 1.0,
    unit: str = "ratio",
) -> Metric:
    return Metric(name, title, unit, formula, text, needs=needs, finish=finish, label="steps", ideal=ideal)


WINDOWS = Definition(
    statistics=(
        _window("window_intended_squared_sum", "weight²", "Σ U², U = Σ u over the window's steps."),
        _window("window_intended_effective_sum", "weight²", "Σ U·E, E = θ now − θ at the window's start."),
        _window("window_effective_squared_sum", "weight²", "Σ E²"),
        _window("window_intended_visible_sum", "weight²", "Σ U·Eᵛ"),
        _window("window_visible_squared_sum", "weight²", "Σ Eᵛ²"),
        replace(
            rounding_variance("window_rounding_variance", "weight⁴", "U·E", "U²", label="steps"), over_steps="last"
        ),
        _window("window_active", "elements", "Elements with U ≠ 0."),
        _window("window_lost", "elements", "U ≠ 0 and E = 0."),
        _window("window_lost_visible", "elements", "U ≠ 0 and Eᵛ = 0."),
    ),
    metrics=(
        _ratio_over_window(
            "edq_window_ratio",
            "EDQ over a window",
            "Σ U·E / Σ U², U = Σ u and E = the change of θ over k steps",
            "As edq_ratio, for k steps together. Hardly depends on k: one step forecasts it.",
            ("window_intended_effective_sum", "window_intended_squared_sum"),
        ),
        _ratio_over_window(
            "edq_window_noise_ratio",
            "EDQ over a window, noise of rounding",
            "√window_rounding_variance / Σ U²",
            "Standard error of edq_window_ratio where rounding is random.",
            ("window_rounding_variance", "window_intended_squared_sum"),
            finish=noise_ratio,
            ideal=0.0,
        ),
        _ratio_over_window(
            "edq_window_cosine",
            "EDQ cosine over a window",
            "Σ U·E / √(Σ U² · Σ E²)",
            "Direction over k steps: nears 1 with k where errors even out, as stochastic rounding's do.",
            ("window_intended_effective_sum", "window_intended_squared_sum", "window_effective_squared_sum"),
            finish=cosine,
        ),
        _ratio_over_window(
            "lost_window_ratio",
            "Updates lost over a window",
            "window_lost / window_active",
            "Share of the updates intended over k steps that left the stored weight where it was. "
            "Judges stochastic rounding, which one step misjudges.",
            ("window_lost", "window_active"),
            ideal=0.0,
            unit="share",
        ),
        _ratio_over_window(
            "edq_visible_window_ratio",
            "EDQ over a window, visible",
            "Σ U·Eᵛ / Σ U²",
            "As edq_window_ratio, for the registered parameter.",
            ("window_intended_visible_sum", "window_intended_squared_sum"),
        ),
        _ratio_over_window(
            "edq_visible_window_cosine",
            "EDQ cosine over a window, visible",
            "Σ U·Eᵛ / √(Σ U² · Σ Eᵛ²)",
            "Direction over k steps of the registered parameter.",
            ("window_intended_visible_sum", "window_intended_squared_sum", "window_visible_squared_sum"),
            finish=cosine,
        ),
        _ratio_over_window(
            "lost_visible_window_ratio",
            "Updates lost over a window, visible",
            "window_lost_visible / window_active",
            "Share of the updates intended over k steps that did not move the registered parameter. "
            "Judges Kahan's, which one step misjudges.",
            ("window_lost_visible", "window_active"),
            ideal=0.0,
            unit="share",
        ),
    ),
)


def _since_attach(name: str, text: str) -> Statistic:
    return Statistic(name, "sum", "last", "weight²", text, needs=("intended",))


ORACLE = Definition(
    statistics=(
        Statistic("oracle_steps", "max", "last", "steps", "Steps since the oracle was attached.", raw=True),
        *sums(
            "elements",
            raw=True,
            oracle_sampled="Elements that the oracle follows: raw.",
            oracle_elements="Elements that they stand for.",
        ),
        Statistic("oracle_active_blocks", "sum", "max", "blocks", "Oracle blocks with some o ≠ 0: raw.", raw=True),
        *sums(
            "weight²",
            needs=("intended",),
            oracle_squared_sum="Σ o²",
            oracle_effective_sum="Σ o·e, on the oracle's sample.",
            oracle_intended_squared_sum="Σ u², on the oracle's sample.",
        ),
        rounding_variance("oracle_rounding_variance", "weight⁴", "o·e", "o²"),
        _since_attach("oracle_displacement_squared_sum", "Σ O², since attach."),
        _since_attach("oracle_displacement_effective_sum", "Σ O·E, since attach."),
        _since_attach("oracle_drift_squared_sum", "Σ (E − O)², since attach."),
    ),
    metrics=(
        Metric(
            "edq_oracle_ratio",
            "EDQ against the oracle",
            "ratio",
            "Σ o·e / Σ o²",
            "This step against an fp64 optimizer that has kept its own weights and states since attach. "
            "Judge |1 − x|.",
            needs=("oracle_effective_sum", "oracle_squared_sum"),
            finish=ratio,
            ideal=1.0,
            interval=Interval(
                "oracle_effective_sum",
                "oracle_squared_sum",
                sample=("oracle_sampled", "oracle_elements", "oracle_active_blocks"),
            ),
            exposed=True,
        ),
        Metric(
            "edq_oracle_noise_ratio",
            "EDQ against the oracle, noise of rounding",
            "ratio",
            "√oracle_rounding_variance / Σ o²",
            "Standard error of edq_oracle_ratio where rounding is random.",
            needs=("oracle_rounding_variance", "oracle_squared_sum"),
            finish=noise_ratio,
            ideal=0.0,
        ),
        Metric(
            "oracle_step_norm_ratio",
            "Step size against the oracle",
            "ratio",
            "√(Σ u² / Σ o²)",
            "Above 1 the steps are too large, below 1 too small.",
            needs=("oracle_intended_squared_sum", "oracle_squared_sum"),
            finish=root_ratio,
            ideal=1.0,
        ),
        Metric(
            "oracle_displacement_ratio",
            "Displacement against the oracle",
            "ratio",
            "Σ O·E / Σ O²",
            "How far the weights have come since attach, along the oracle's way. "
            "Compare at equal oracle_steps only.",
            needs=("oracle_displacement_effective_sum", "oracle_displacement_squared_sum"),
            finish=ratio,
            ideal=1.0,
        ),
        Metric(
            "oracle_drift_ratio",
            "Drift from the oracle",
            "ratio",
            "√(Σ (E − O)² / Σ O²)",
            "Distance from where the oracle stands, in units of its displacement.",
            needs=("oracle_drift_squared_sum", "oracle_displacement_squared_sum"),
            finish=root_ratio,
            ideal=0.0,
        ),
        Metric(
            "oracle_steps",
            "Oracle steps",
            "steps",
            "oracle_steps",
            "Steps since the oracle was attached.",
            needs=("oracle_steps",),
            finish=as_is,
        ),
    ),
)
