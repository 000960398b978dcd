"""An alert on what edq_ratio cannot see: a second moment that no longer decays makes later steps too small."""

from __future__ import annotations

from collage_monitor.alerts import Condition, about_runs

__all__ = ["ALERT"]

ALERT = about_runs(
    "StatesStuck",
    Condition("collage_state_decrement_ratio", "<", 0.5, labels=(("state", "=", "exp_avg_sq"),)),
    for_seconds=1800.0,
    warm_up_steps=1000,
    severity="warning",
    summary="the second moment decays less than half as much as it should",
    meaning=(
        "Its format rounds the decay of exp_avg_sq away: the average can grow, but hardly shrink. As gradients "
        "fall, steps become too small, and edq_ratio still reads 1."
    ),
    other_causes=("gradients that grow in every step: few elements should have shrunk, and the ratio is noisy",),
    first_step='Keep the states wider: strategy="plus" or "fp32-states" from the next checkpoint on.',
)
