"""Alerts on changes that no judgement of the recent past sees: EDQ against its own hour, what chance may explain of
a single step, weights that ranks or other code change, expectations that do not hold.

In each alert `checks[i]` weighs `other_causes[i]`. Names of alerts are fixed: stored incidents, silences and
Prometheus rules go by them. A bound that changes needs its case in `tests/alerts/traces.py`, and the generated
rules and runbook. What the judgement holds against a run wakes somebody by `collage_monitor.diagnosis`.
"""

from __future__ import annotations

import math
from typing import Final

from collage_monitor.diagnosis.alert import Condition, about_runs
from collage_monitor.diagnosis.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    loaded_anew,
    near_schedule_end,
    restarted,
    ruled_out,
    supported,
    text_of,
)
from collage_monitor.diagnosis.words import percent
from collage_monitor.strategies import STRATEGIES

__all__ = ["ALERTS"]

_GOOD = 0.9
"""From here on nearly all of the intended descent counts as arrived."""
_INTENDED = 0.1
"""Share of the usual update of the run's last fifth below which one step's loss is none."""
_STOCHASTIC = "|".join(name for name, entry in STRATEGIES.items() if entry.stochastic)
_WINDOW_SETTLE_STEPS = 300
"""A window of 64 steps ends every 256 to 260: until then the newest is from before the resume."""


def _rate_lowered(evidence: IncidentEvidence) -> CauseVerdict:
    both = evidence.both("learning_rate")
    if both is None:
        return left_open("learning_rate was not logged on both sides")
    clause = f"learning_rate was {text_of(both[0])} before and {text_of(both[1])} after"
    return supported(clause) if both[1] < 0.9 * both[0] else ruled_out(clause)


def _residuals_not_resumed(evidence: IncidentEvidence) -> CauseVerdict:
    attempt = restarted(evidence)
    if attempt is None:
        return ruled_out("no attempt began at these steps") if evidence.before else left_open("no step is known")
    began = f"attempt {attempt.attempt} began at step {attempt.first_step:,}"
    kept = evidence.watch.fingerprint if evidence.watch else None
    if kept is not None and not kept.residual:
        return ruled_out(f"{began}, but this strategy keeps no residuals")
    dropped, zero = evidence.now("residual_dropped_ratio"), evidence.both("residual_zero_ratio")
    if dropped is None and zero is None:
        return left_open(f"{began}; nothing of residuals was reported")
    if dropped is not None and dropped > 0.5:
        return supported(f"{began}, and {percent(dropped)} of the residuals were dropped")
    if zero is not None:
        clause = f"{began}; the share of residuals at 0 was {percent(zero[0])} before and {percent(zero[1])} after"
        return supported(clause) if zero[1] > zero[0] + 0.1 else ruled_out(clause)
    return ruled_out(f"{began}, and residuals were not dropped")


def _gaps_grew(evidence: IncidentEvidence) -> CauseVerdict:
    """The margin in octaves falls as updates shrink and as gaps grow."""
    margin, size = evidence.both("half_ulp_margin"), evidence.both("intended_norm")
    if margin is None or size is None or min(size) <= 0:
        return left_open("half_ulp_margin or intended_norm was not reported on both sides")
    shrunk = math.log2(size[0] / size[1])
    grown = margin[0] - margin[1] - shrunk
    clause = f"gaps beside the weights grew by a factor of {2**grown:.3g}"
    return supported(clause) if grown > 0.5 else ruled_out(clause)


def _window_is_short(evidence: IncidentEvidence) -> CauseVerdict:
    """An update of |u| = 2^margin half gaps needs 2^(1 - margin) steps for one gap."""
    margin, window = evidence.now("half_ulp_margin"), evidence.incident.labels.get("window", "")
    if margin is None or not window.isdigit():
        return left_open("half_ulp_margin or the window was not reported")
    needed = 2.0 ** (1 - margin)
    clause = f"the median update needs {needed:.3g} steps for one gap, the window has {window}"
    return supported(clause) if needed > int(window) else ruled_out(clause)


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
    verdict = loaded_anew(evidence)
    return (
        left_open(f"{verdict.because}; weights can be loaded without a restart, too")
        if verdict.holds is False
        else verdict
    )


def _average_swapped(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("what writes the weights is not reported")


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
        "CollageEdqDrop",
        # Only for runs that started healthy; CollageEdqLow covers the others.
        Condition("collage_edq_ratio", "<", 0.9, "share of quantile", quantile=0.9, quantile_from=_GOOD),
        window_seconds=3600.0,
        for_seconds=300.0,
        least_intended_share=_INTENDED,
        severity="warning",
        on_by_default=True,
        summary="the effective descent quality was good, and fell by more than a tenth within the hour",
        meaning=(
            "Less of the intended update reaches the weights than a short while ago. Either updates have become "
            "smaller than what the weights' format can hold, or a residual that carried them is gone."
        ),
        other_causes=(
            "the schedule lowered the learning rate: updates shrink, the gaps between weights do not",
            "the run resumed from a checkpoint that did not keep the residuals",
            "weights grew past a power of two, where the gap doubles",
        ),
        checks=(_rate_lowered, _residuals_not_resumed, _gaps_grew),
        first_step=(
            "Open the run's layer × step heatmap of edq_ratio, sorted by worst. If all layers fell at once, "
            "suspect the schedule or a resume; if single layers did, the size of their weights. Then compare "
            "half_ulp_margin before and after."
        ),
    ),
    about_runs(
        "CollageWindowUpdatesLost",
        Condition("collage_lost_window_ratio", ">", 0.5, "recent", labels=(("strategy", "=~", _STOCHASTIC),)),
        window_seconds=3600.0,
        for_seconds=600.0,
        settle_steps=_WINDOW_SETTLE_STEPS,
        least_intended_share=_INTENDED,
        severity="warning",
        summary="over a window of steps more than half of the weights do not move",
        meaning=(
            "Stochastic rounding brings updates to the weights on average. In this window more than half of "
            "the weights that should have moved did not: updates are so small that chance rarely moves a "
            "weight."
        ),
        other_causes=(
            "the window is too short for updates of this size: watch a longer one",
            "the end of a learning-rate schedule, where updates are small by intent",
        ),
        checks=(_window_is_short, near_schedule_end),
        first_step=(
            "Compare edq_window_ratio of the same window. If it is near 1, the descent arrives and only its "
            "noise is large. If it is low, too, keep more of the weights (light-stochastic or split-master)."
        ),
    ),
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
