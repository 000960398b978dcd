"""The states beside the weights, and how exactly they change: moving averages, weight decay, residuals.

The agent measures it in `collage_agent/stats/optimizer_state.py`; formulas are those of `docs/metrics.md`, and
names are fixed (`tests/agent/stats/test_states.py`).
"""

from __future__ import annotations

from collage_monitor.definitions import (
    Definition,
    Metric,
    Statistic,
    as_is,
    noise_ratio,
    ratio,
    rounding_variance,
    sums,
)
from collage_monitor.statistics.classes import share_of_finite

__all__ = ["DECAY", "RESIDUALS", "STATES"]

STATES = Definition(
    statistics=(
        *sums(
            "state",
            needs=("intended",),
            label="state",
            state_decrement_observed_sum=(
                "Σ (|s after| − |s before|) as stored, over elements whose |s| should shrink."
            ),
            state_decrement_intended_sum="The same sum in exact arithmetic.",
            state_increment_observed_sum=(
                "Σ (|s after| − |s before|) as stored of a state that only sums up, where |s| should grow."
            ),
            state_increment_intended_sum="The same sum in exact arithmetic.",
        ),
        rounding_variance("state_rounding_variance", "state²", "observed changes", "intended ones", label="state"),
        *sums(
            "elements",
            needs=("intended",),
            label="state",
            state_zero="Elements with g ≠ 0 whose state is 0 after the step.",
            state_infinite="Finite elements whose float16 state is infinite after the step.",
        ),
        *sums("elements", needs=("intended",), gradient_nonzero="Finite elements with g ≠ 0."),
    ),
    metrics=(
        Metric(
            "state_decrement_ratio",
            "State decrement",
            "ratio",
            "Σ (|s after| − |s before|) observed / intended, where |s| should shrink",
            "1: the moving average decays as it should. 0: it can only grow, and steps become too small.",
            needs=("state_decrement_observed_sum", "state_decrement_intended_sum"),
            finish=ratio,
            label="state",
            ideal=1.0,
            exposed=True,
        ),
        Metric(
            "state_decrement_noise_ratio",
            "State decrement, noise of rounding",
            "ratio",
            "√state_rounding_variance / |Σ intended decrements|",
            "Standard error of state_decrement_ratio where states are rounded at random: what chance makes of it.",
            needs=("state_rounding_variance", "state_decrement_intended_sum"),
            finish=noise_ratio,
            label="state",
            ideal=0.0,
        ),
        Metric(
            "state_increment_ratio",
            "State increment",
            "ratio",
            "Σ (|s after| − |s before|) observed / intended, of a sum, where |s| should grow",
            "1: the sum, as Adagrad's, takes all that is added to it. Below 1, part of that is rounded away, and "
            "steps that divide by the sum's root become too long.",
            needs=("state_increment_observed_sum", "state_increment_intended_sum"),
            finish=ratio,
            label="state",
            ideal=1.0,
        ),
        Metric(
            "state_increment_noise_ratio",
            "State increment, noise of rounding",
            "ratio",
            "√state_rounding_variance / |Σ intended increments|",
            "Standard error of state_increment_ratio where states are rounded at random: what chance makes of it.",
            needs=("state_rounding_variance", "state_increment_intended_sum"),
            finish=noise_ratio,
            label="state",
            ideal=0.0,
        ),
        Metric(
            "state_zero_ratio",
            "State zero",
            "share",
            "state_zero / gradient_nonzero",
            "Share of a state's elements that are 0 where the gradient is not: "
            "an fp16 second moment that underflows.",
            needs=("state_zero", "gradient_nonzero"),
            finish=ratio,
            label="state",
            ideal=0.0,
        ),
        Metric(
            "state_infinite_ratio",
            "State infinite",
            "share",
            "state_infinite / finite elements",
            "Share of a float16 state's elements that are infinite: their updates are 0, or no numbers.",
            needs=("state_infinite", "elements", "nonfinite"),
            finish=share_of_finite,
            label="state",
            ideal=0.0,
        ),
    ),
)


DECAY = Definition(
    statistics=tuple(
        sums(
            "weight²",
            decay_squared_sum="Σ d² of decoupled decay alone, d = −lr·λ·θᵛ.",
            decay_kept_sum="Σ d·d̂, d̂ = RN(θᵛ·(1 − lr·λ)) − θᵛ in the parameter's dtype.",
        )
    ),
    metrics=(
        Metric(
            "decay_ratio",
            "Weight decay kept",
            "share",
            "Σ d·d̂ / Σ d²",
            "Share of decoupled weight decay that is kept as a rounded operation of its own, as torch makes it. "
            "Undefined for decay that is coupled or zero; a strategy that makes it part of its update keeps more.",
            needs=("decay_kept_sum", "decay_squared_sum"),
            finish=ratio,
            ideal=1.0,
        ),
    ),
)


def _last(name: str, unit: str, text: str, label: str | None = None) -> Statistic:
    return Statistic(name, "sum", "last", unit, text, label)


RESIDUALS = Definition(
    statistics=(
        _last("residual_elements", "elements", "Elements with a finite residual r, θ = θᵛ + r."),
        _last("residual_zero", "elements", "Elements whose residual is 0 before the step."),
        Statistic(
            "residual_dropped",
            "sum",
            "max",
            "elements",
            "Elements whose residual is 0 before the step though they had one, or moved by steps that leave one.",
        ),
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
            "about ½ in training, 1 where bits are appended.",
            needs=("residual_fill_sum", "residual_elements"),
            finish=ratio,
        ),
        Metric(
            "residual_zero_ratio",
            "Residual zero",
            "share",
            "residual_zero / residual_elements",
            "Share of the residuals that are 0 before the step. 1 is normal until a first step moves the weights, "
            "also after a conversion; residual_dropped_ratio counts those that should not be 0.",
            needs=("residual_zero", "residual_elements"),
            finish=ratio,
        ),
        Metric(
            "residual_dropped_ratio",
            "Residual dropped",
            "share",
            "residual_dropped / residual_elements",
            "Largest share, of the steps merged, of the residuals that are 0 before a step though the element had "
            "one, or moved by steps that leave one: something dropped them, such as a resume. Below 0.02 in "
            "training.",
            needs=("residual_dropped", "residual_elements"),
            finish=ratio,
            ideal=0.0,
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
