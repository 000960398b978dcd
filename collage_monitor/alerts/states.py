"""Alerts on the memory between steps: states, residuals, decay, and external changes of weights.

In each alert `checks[i]` weighs `other_causes[i]`. Names of alerts are fixed: stored incidents, silences and
Prometheus rules go by them. A bound that changes needs its case in `tests/alerts/traces.py`, and the generated
rules and runbook.
"""

from __future__ import annotations

from typing import Final

from collage_monitor.alerts.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    near_schedule_end,
    restarted,
    rose,
    ruled_out,
    supported,
    text_of,
)
from collage_monitor.alerts.definition import Condition, about_runs, finding_condition

__all__ = ["ALERTS"]


def _gradients_grow(evidence: IncidentEvidence) -> CauseVerdict:
    return rose(evidence, "grad_norm", by=0.5)


def _loaded_anew(evidence: IncidentEvidence) -> CauseVerdict:
    if evidence.before is None:
        return left_open("no step is known")
    attempt = restarted(evidence)
    if attempt is None:
        return ruled_out("no attempt began at these steps")
    began = f"attempt {attempt.attempt} began at step {attempt.first_step:,}"
    return left_open(f"{began}; whether that was a restart on purpose was not reported")


def _converted(evidence: IncidentEvidence) -> CauseVerdict:
    """Decided by the optimizer's note of a conversion, or without one by whether residuals were reported before."""
    conversion = evidence.watch.conversion if evidence.watch else None
    before, after = evidence.before, evidence.after
    if before is None or after is None:
        return left_open("no step of a change is known" + ("" if conversion is None else f"; {conversion}"))
    if conversion is not None and before.first_step <= conversion.step + 1 <= after.last_step:
        return supported(str(conversion))
    kept, keeps = (span.number("residual_zero_ratio") is not None for span in (before, after))
    if keeps and not kept:
        return supported(f"no residuals were kept before step {after.first_step:,}")
    if kept:
        return ruled_out("residuals were kept before, too")
    return left_open("nothing of residuals was reported") if conversion is None else ruled_out(str(conversion))


def _written_from_outside(evidence: IncidentEvidence) -> CauseVerdict:
    return rose(evidence, "external_writes", by=0.0)


def _always_infinite(evidence: IncidentEvidence) -> CauseVerdict:
    both = evidence.both(evidence.metric or "")
    if both is None:
        return left_open("how many there were before was not reported")
    clause = f"{text_of(both[0])} were not finite before, {text_of(both[1])} after"
    return supported(clause) if 0 < both[1] <= both[0] else ruled_out(clause)


def _drawn_apart(evidence: IncidentEvidence) -> CauseVerdict:
    steps = [event.step for event in evidence.events if event.kind == "replica_mismatch" and event.step is not None]
    first = evidence.run.first_step if evidence.run else None
    if not steps or first is None:
        return left_open("at which step ranks first differed was not reported")
    every = evidence.watch.every if evidence.watch else 1
    clause = f"ranks first differ at step {min(steps):,}, the run began at {first:,}"
    if min(steps) <= first + every:
        return supported(clause)
    # What is left out may be an earlier one.
    return (
        left_open("at which step ranks first differed is not known") if evidence.older_events else ruled_out(clause)
    )


def _order_of_additions(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("in which order devices add is not reported")


def _loaded_on_purpose(evidence: IncidentEvidence) -> CauseVerdict:
    verdict = _loaded_anew(evidence)
    return (
        left_open(f"{verdict.because}; weights can be loaded without a restart, too")
        if verdict.holds is False
        else verdict
    )


def _average_swapped(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("what writes the weights is not reported")


def _another_decay(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("the decay that the code uses is not reported")


def _begun_anew(evidence: IncidentEvidence) -> CauseVerdict:
    losses = evidence.watch.resume_losses if evidence.watch else []
    if not losses:
        return left_open("what was lost was not reported")
    return left_open(f"{'; '.join(loss.text for loss in losses)}; whether that was meant is not reported")


def _expected_of_another(evidence: IncidentEvidence) -> CauseVerdict:
    broken = evidence.watch.broken if evidence.watch else []
    if not broken:
        return left_open("which expectation does not hold was not reported")
    return left_open(f"{'; '.join(map(str, broken))}; whether that is meant is not reported")


def _not_recognised(evidence: IncidentEvidence) -> CauseVerdict:
    if evidence.watch is None:
        return left_open("how weights are kept was not reported")
    clause = f"weights are seen to be kept as {evidence.watch.observed_strategy}"
    return supported(clause) if evidence.watch.observed_strategy == "unknown" else ruled_out(clause)


ALERTS: Final = (
    about_runs(
        "CollageExpectationBroken",
        Condition("collage_expectations_broken"),
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="critical",
        on_by_default=True,
        summary="the training breaks an expectation",
        meaning=(
            "watch(expect=…) says how weights and states are to be kept, or how much of the updates is to "
            "arrive. This launch breaks it: a resume cast states, or the optimizer is another one."
        ),
        other_causes=(
            "an expectation that was written for another training",
            "an optimizer that meets the expectation in a way that the agent does not recognise",
        ),
        checks=(_expected_of_another, _not_recognised),
        first_step=(
            "The run's timeline names the expectation, what the agent sees instead, and the step. Stop the "
            "training if the expectation is right: updates lost from now on do not come back."
        ),
    ),
    about_runs(
        "CollageResumeLoss",
        Condition("collage_resume_losses", ">", 0.0, "growth"),
        window_seconds=1800.0,
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="critical",
        summary="the resume lost part of the optimizer's state",
        meaning=(
            "Master weights or residuals hold nothing beside their weights, averages are 0, or the step counter "
            "begins again or cannot count: the checkpoint lacked them, or its loading cast or dropped them."
        ),
        other_causes=(
            "an optimizer that was restarted on purpose, with weights from elsewhere",
            "weights that are kept in this way only from this launch on",
        ),
        checks=(_begun_anew, _converted),
        first_step=(
            "Stop the training: it continues with less than was saved. Inspect the checkpoint with "
            "collage-monitor audit, fix the code that saves or loads it, and resume from an earlier one."
        ),
    ),
    about_runs(
        "CollageSecondMomentStuck",
        Condition("collage_state_decrement_ratio", "<", 0.5, labels=(("state", "=", "exp_avg_sq"),)),
        for_seconds=900.0,
        severity="warning",
        on_by_default=True,
        summary="the second moment decays less than half as much as it should",
        meaning=(
            "Its format rounds its decay away: the average can grow, but hardly shrink. As gradients fall, steps "
            "become too small, and edq_ratio still reads 1."
        ),
        other_causes=(
            "gradients that grow in every step: few elements should have shrunk, and the ratio is noisy",
        ),
        checks=(_gradients_grow,),
        first_step=(
            "Follow the run's advice, which names a way to keep the second moment that fits the optimizer. "
            "Or lower β₂ to a value that the format can decay."
        ),
    ),
    about_runs(
        "CollageResidualsOff",
        finding_condition("residual_dropped_ratio", ">", 0.4),
        finding_condition("residual_fill_ratio", ">", 2.0),
        finding_condition("residual_zero_ratio", ">", 0.0),
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        keep_firing_seconds=1800.0,
        severity="warning",
        on_by_default=True,
        summary="residuals were dropped, or hold more than rounding can leave",
        meaning=(
            "A residual holds the part of a weight that rounding cut off. If residuals are 0 again, something "
            "dropped them, and the updates they carried are lost. Residuals that begin empty, as after a "
            "conversion or before the first step that moves weights, do not count. If they hold more than two "
            "half gaps, weight and residual no longer belong together."
        ),
        other_causes=(
            "a checkpoint of another optimizer was loaded on purpose, to restart",
            "weights were written from outside: external_writes then counts it",
            "weights were converted from a strategy without residuals: there were none to drop",
        ),
        checks=(_loaded_anew, _written_from_outside, _converted),
        first_step=(
            "Compare residual_dropped_ratio and residual_fill_ratio before and after the last resume. Save and "
            "load the optimizer's whole state, and resume from the last checkpoint that has the residuals."
        ),
    ),
    about_runs(
        "CollageDecayLost",
        finding_condition("decay_ratio", "<", 0.5),
        for_seconds=1800.0,
        severity="warning",
        summary="more than half of the weight decay is rounded away",
        meaning=(
            "The optimizer applies weight decay as a separate, rounded operation. Each decay is below half a "
            "gap, so the weights do not change, and the run trains without the decay in its settings."
        ),
        other_causes=("the end of a learning-rate schedule, where decay is next to nothing by intent",),
        checks=(near_schedule_end,),
        first_step=(
            "Look at decay_ratio by layer. Make the decay part of the update (every strategy here but plain "
            "does so), or keep the weights in a wider format."
        ),
    ),
    about_runs(
        "CollageNotFinite",
        finding_condition("nonfinite_params", ">", 0.0),
        finding_condition("residual_nonfinite", ">", 0.0),
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="critical",
        on_by_default=True,
        summary="weights or residuals are NaN or infinite",
        meaning="A NaN or infinity spreads with the next forward pass, and no later step repairs it.",
        other_causes=("parameters that are infinite on purpose, such as masks stored among the weights",),
        checks=(_always_infinite,),
        first_step=(
            "Stop the run. Find the first layer with nonfinite_params or residual_nonfinite, and resume from a "
            "checkpoint before that step with a lower learning rate or with clipping."
        ),
    ),
    about_runs(
        "CollageAverageOff",
        finding_condition("average_lost_ratio", ">", 0.0),
        Condition("collage_finding", ">", 0.05, "distance", (("key", "=", "average_edq_ratio"),)),
        finding_condition("average_nonfinite", ">", 0.0),
        for_seconds=900.0,
        severity="warning",
        on_by_default=True,
        summary="the average of the weights does not follow them",
        meaning=(
            "An average of the weights (EMA) has updates of its own, small ones. They are rounded away, or arrive "
            "with another size than its decay says, or it is NaN. The loss of the training shows none of this: it "
            "shows when the average is evaluated or sampled from."
        ),
        other_causes=("a decay that changes during the training, where one number was stated for it",),
        checks=(_another_decay,),
        first_step=(
            "Look at average_edq_ratio, average_lost_ratio and average_moved_ratio. Keep the average in float32. "
            "If few of its updates are lost, compare its decay and sign in the code with the one that was stated."
        ),
    ),
    about_runs(
        "CollageReplicaMismatch",
        Condition("collage_replica_mismatches", ">", 0.0),
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="critical",
        on_by_default=True,
        summary="ranks that should hold the same weights do not",
        meaning=(
            "Checksums of the same sampled elements differ between replicas. Memory or a link flipped bits, or "
            "code treats ranks differently. Averaged gradients spread the error to all of them."
        ),
        other_causes=(
            "weights that are drawn at random on each rank, without a common seed",
            "an operation whose order of additions differs between devices",
        ),
        checks=(_drawn_apart, _order_of_additions),
        first_step=(
            "The run's timeline names the first layer, step and ranks. Remove the machine of the rank that "
            "differs, and resume all ranks from one checkpoint."
        ),
    ),
    about_runs(
        "CollageExternalWrites",
        Condition("collage_external_writes", ">", 0.0, "growth"),
        window_seconds=1800.0,
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="warning",
        summary="something else writes the weights that the optimizer keeps",
        meaning=(
            "The optimizer found a weight changed between two steps, and dropped the residual or master "
            "value beside it. Each such write loses the updates gathered there."
        ),
        other_causes=(
            "weights loaded on purpose in the middle of a run",
            "an average of weights that is swapped in for evaluation and out again",
        ),
        checks=(_loaded_on_purpose, _average_swapped),
        first_step=(
            "Look at the steps at which external_writes grows. Load weights through the optimizer's own loading, "
            "and write averages to a copy."
        ),
    ),
)
