"""Alerts on the training itself: gradients, loss, skipped steps."""

from __future__ import annotations

from typing import Final

from collage_monitor.alerts.definition import Condition, about_runs

__all__ = ["ALERTS"]

ALERTS: Final = (
    about_runs(
        "CollageGradientExploding",
        Condition("collage:grad_norm", ">", 20.0, "share of quantile", quantile=0.5),
        window_seconds=3600.0,
        for_seconds=120.0,
        severity="warning",
        summary="the gradient's norm is twenty times its median of the last hour",
        meaning=(
            "Gradients grow without bound, or a batch is far from all others. The norm before clipping counts "
            "where it is logged (grad_norm_unclipped); without it, clipping hides an explosion."
        ),
        other_causes=(
            "a change of the data or of the sequence length",
            "a loss that is summed rather than averaged over a larger batch",
        ),
        first_step=(
            "Compare loss and grad_norm by layer at the step where it began. Lower the learning rate, clip, or "
            "skip the batch, and resume from the last checkpoint before it."
        ),
    ),
    about_runs(
        "CollageGradientVanishing",
        Condition("collage:grad_norm", "<", 0.01, "share of quantile", quantile=0.75),
        window_seconds=3600.0,
        for_seconds=1800.0,
        severity="info",
        summary="the gradient's norm is below a hundredth of what it was in the last hour",
        meaning="The loss hardly depends on the weights any more: the model has saturated, or a path is cut.",
        other_causes=(
            "a small data set that is learnt by heart: the loss is 0",
            "a mask that leaves hardly any token to learn from",
        ),
        first_step=(
            "Look at state_zero_ratio and at grad_norm by layer: where does it begin? In fp16, check the loss "
            "scale."
        ),
    ),
    about_runs(
        "CollageLossUnstable",
        Condition("collage_loss", ">", 8.0, "deviations"),
        window_seconds=3600.0,
        for_seconds=300.0,
        severity="warning",
        summary="the loss stays far above what it was in the last hour",
        meaning=(
            "The loss is more than eight robust standard deviations above its median of the last hour, and has "
            "been for minutes: this is no single batch. Training diverges, or what it sees has changed."
        ),
        other_causes=(
            "another data set, or a curriculum's next stage",
            "a loss logged once for each micro-batch, of parts that differ",
        ),
        first_step=(
            "Compare grad_norm and update_to_weight_ratio before and after. If they rose first, lower the learning "
            "rate and resume before the rise; if not, look at the data."
        ),
    ),
    about_runs(
        "CollageLossNotFinite",
        Condition("collage_loss", measure="not finite"),
        for_seconds=60.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="critical",
        on_by_default=True,
        summary="the loss is NaN or infinite",
        meaning="The forward pass overflows or divides by 0; each step from here on may spoil the weights.",
        other_causes=("a batch without a single target: the mean over nothing is NaN",),
        first_step=(
            "Look at nonfinite_params: if it is 0, the weights are still whole. Stop, and resume from the last "
            "checkpoint with a finite loss."
        ),
    ),
    about_runs(
        "CollageStepsSkipped",
        Condition("collage_skipped_steps", ">", 20.0, "growth"),
        window_seconds=1800.0,
        for_seconds=0.0,
        severity="info",
        summary="the loss scaler skips many steps",
        meaning=(
            "More than twenty steps of the last half hour were skipped because gradients overflowed in fp16. The "
            "training goes on, but part of its data teaches nothing."
        ),
        other_causes=("a loss scale that starts far too high: it halves at each skip, and settles",),
        first_step=(
            "Watch skipped_steps: if it goes on growing, gradients overflow at any scale. Look at grad_norm by "
            "layer, lower the learning rate, or train in bf16."
        ),
    ),
)
