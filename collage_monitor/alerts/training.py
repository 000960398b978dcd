"""Alerts on the training itself: gradients, loss, skipped steps.

Names of alerts are fixed: stored incidents, silences and Prometheus rules go by them. A bound that changes needs
its case in `tests/alerts/traces.py`, and the generated rules and runbook.
"""

from __future__ import annotations

from typing import Final

from collage_monitor.diagnosis.alert import Condition, about_runs
from collage_monitor.diagnosis.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    ruled_out,
    supported,
    text_of,
    tokens_a_step,
)

__all__ = ["ALERTS"]

_LEARNT_LOSS = 0.01
"""A loss below this hardly leaves a gradient."""


def _data_changed(evidence: IncidentEvidence) -> CauseVerdict:
    tokens = tokens_a_step(evidence)
    if tokens is None:
        return left_open("what the data are is not reported, and tokens were not logged")
    clause = f"a step had {text_of(tokens[0])} tokens before and {text_of(tokens[1])} after"
    if abs(tokens[1] - tokens[0]) > 0.1 * tokens[0]:
        return supported(clause)
    return left_open(f"{clause}; what the data are is not reported")


def _batch_grew(evidence: IncidentEvidence) -> CauseVerdict:
    tokens = tokens_a_step(evidence)
    if tokens is None:
        return left_open("tokens were not logged")
    clause = f"a step had {text_of(tokens[0])} tokens before and {text_of(tokens[1])} after"
    return supported(clause) if tokens[1] > 1.5 * tokens[0] else ruled_out(clause)


def _learnt_by_heart(evidence: IncidentEvidence) -> CauseVerdict:
    loss = evidence.now("loss")
    if loss is None:
        return left_open("the loss was not logged")
    clause = f"the loss is {text_of(loss)}"
    return supported(clause) if loss < _LEARNT_LOSS else ruled_out(clause)


def _masked(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("how many tokens count in the loss is not reported")


def _logged_in_parts(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("how the loss is made is not reported")


def _one_empty_batch(evidence: IncidentEvidence) -> CauseVerdict:
    """A mean over nothing is NaN for one step; an overflow stays."""
    values = evidence.series.values if evidence.series else []
    finite = [isinstance(value, float | int) for value in values]
    if all(finite):
        return left_open("the points that are kept are all finite")
    if any(finite[finite.index(False) :]):
        return supported("the loss was finite again afterwards")
    return ruled_out(f"the loss was not finite at any of the {finite.count(False)} points since")


def _scale_settles(evidence: IncidentEvidence) -> CauseVerdict:
    then, newest = (
        evidence.now("skipped_steps"),
        evidence.run.scalars.get("skipped_steps") if evidence.run else None,
    )
    if then is None or newest is None or not isinstance(newest.value, float | int):
        return left_open("skipped_steps was not logged after the alert")
    clause = f"{text_of(then)} steps were skipped around the alert, {text_of(newest.value)} by step {newest.step:,}"
    return supported(clause) if newest.value <= 1.1 * then else ruled_out(f"{clause}: it goes on")


ALERTS: Final = (
    about_runs(
        "CollageGradientExploding",
        Condition("collage:grad_norm", ">", 20.0, "share of quantile", quantile=0.5),
        window_seconds=3600.0,
        for_seconds=120.0,
        severity="warning",
        summary="the gradient's norm is twenty times its median of the last hour",
        meaning=(
            "Gradients grow without bound, or a batch is far from all others. The alert uses the norm before "
            "clipping if it is logged (grad_norm_unclipped); otherwise clipping hides an explosion."
        ),
        other_causes=(
            "a change of the data or of the sequence length",
            "a loss that is summed rather than averaged over a larger batch",
        ),
        checks=(_data_changed, _batch_grew),
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
        summary="the gradient's norm is below a hundredth of its value in the last hour",
        meaning="The loss hardly depends on the weights any more: the model has saturated, or a path is cut.",
        other_causes=(
            "a small data set that the model has memorised: the loss is 0",
            "a mask that leaves hardly any token to learn from",
        ),
        checks=(_learnt_by_heart, _masked),
        first_step=(
            "Look at state_zero_ratio and at grad_norm by layer to find where it begins. In fp16, check the "
            "loss scale."
        ),
    ),
    about_runs(
        "CollageLossUnstable",
        Condition("collage_loss", ">", 8.0, "deviations"),
        window_seconds=3600.0,
        for_seconds=300.0,
        severity="warning",
        summary="the loss stays far above its value in the last hour",
        meaning=(
            "The loss is more than eight robust standard deviations above its median of the last hour. It "
            "has been for minutes, so a single batch is not the reason. Training diverges, or the data has "
            "changed."
        ),
        other_causes=(
            "another data set, or a curriculum's next stage",
            "a loss logged for each micro-batch, where micro-batches differ",
        ),
        checks=(_data_changed, _logged_in_parts),
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
        checks=(_one_empty_batch,),
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
            "More than twenty steps of the last half hour were skipped because gradients overflowed in fp16. "
            "The training goes on, but learns nothing from part of its data."
        ),
        other_causes=("a loss scale that starts far too high: it halves at each skip, and settles",),
        checks=(_scale_settles,),
        first_step=(
            "Watch skipped_steps: if it keeps growing, gradients overflow at any scale. Look at grad_norm by "
            "layer, lower the learning rate, or train in bf16."
        ),
    ),
)
