"""Alerts on weights that ranks or other code change, and on expectations that do not hold.

In each alert `checks[i]` weighs `other_causes[i]`. Names of alerts are fixed: stored incidents, silences and
Prometheus rules go by them. A bound that changes needs its case in `tests/alerts/traces.py`, and the generated
rules and runbook. What the judgement holds against a run wakes somebody by `collage_monitor.diagnosis`.
"""

from __future__ import annotations

from typing import Final

from collage_monitor.diagnosis.alert import Condition, about_runs
from collage_monitor.diagnosis.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    loaded_anew,
    ruled_out,
    supported,
)

__all__ = ["ALERTS"]


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
