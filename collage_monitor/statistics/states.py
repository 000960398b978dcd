"""Moving averages: whether they still decay, and whether they are zero where the gradient is not."""

from __future__ import annotations

from collage_monitor.definitions import Definition, Metric, ratio, sums

__all__ = ["DEFINITION"]

DEFINITION = Definition(
    statistics=(
        *sums(
            "state",
            needs=("intended",),
            label="state",
            state_decrement_observed_sum=(
                "Σ (|s after| − |s before|) as stored, over elements whose |s| should shrink."
            ),
            state_decrement_intended_sum="The same sum in exact arithmetic.",
        ),
        *sums(
            "elements",
            needs=("intended",),
            label="state",
            state_zero="Elements with g ≠ 0 whose state is 0 after the step.",
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
            "state_zero_ratio",
            "State zero",
            "ratio",
            "state_zero / gradient_nonzero",
            "Share of a state's elements that are 0 where the gradient is not: "
            "an fp16 second moment that underflows.",
            needs=("state_zero", "gradient_nonzero"),
            finish=ratio,
            label="state",
            ideal=0.0,
        ),
    ),
)
