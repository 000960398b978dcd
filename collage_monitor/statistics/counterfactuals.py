"""Counterfactuals: how much other strategies would have kept of the same step.

The agent measures it in `collage_agent/stats/counterfactuals.py`; formulas are those of `docs/metrics.md`, and
names are fixed (`tests/agent/stats/test_counterfactuals.py`).
"""

from __future__ import annotations

from collage_monitor.definitions import Definition, Metric, ratio, sums

__all__ = ["DEFINITION"]

DEFINITION = Definition(
    statistics=(
        *sums(
            "weight²",
            needs=("intended",),
            counterfactual_squared_sum="Σ u², of the steps with counterfactuals.",
        ),
        *sums(
            "weight²",
            needs=("intended",),
            label="method/dtype",
            counterfactual_kept_sum="Σ u·e, where e is what this method would have made of the step.",
            counterfactual_variance_sum="Σ Var(e), of methods that round at random.",
        ),
    ),
    metrics=(
        Metric(
            "counterfactual_edq_ratio",
            "EDQ, had the weights been kept otherwise",
            "ratio",
            "counterfactual_kept_sum / counterfactual_squared_sum",
            "What another method would have kept of these very steps, from the same θ and u. "
            "Stochastic rounding keeps 1 in expectation: see its variance.",
            needs=("counterfactual_kept_sum", "counterfactual_squared_sum"),
            finish=ratio,
            label="method/dtype",
            ideal=1.0,
        ),
        Metric(
            "counterfactual_variance_ratio",
            "Noise, had the weights been kept otherwise",
            "ratio",
            "counterfactual_variance_sum / counterfactual_squared_sum",
            "How much noise stochastic rounding would have added to an update, in units of the update's square.",
            needs=("counterfactual_variance_sum", "counterfactual_squared_sum"),
            finish=ratio,
            label="method/dtype",
            ideal=0.0,
        ),
    ),
)
