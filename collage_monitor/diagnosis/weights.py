"""Weights, residuals, states, averages of weights and losses that are no numbers any more, and averages of weights
that do not follow.

In each alert `checks[i]` weighs `other_causes[i]`. Names of alerts are fixed: stored incidents, silences and
Prometheus rules go by them. Bounds are stated in `docs/reference/verdict.md`, each with its case in
`tests/diagnosis/test_judgement.py`; sentences are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from collage_monitor.diagnosis.case import EDQ_TOLERANCE, LOST_TOLERANCE, Case
from collage_monitor.diagnosis.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    ruled_out,
    supported,
    text_of,
)
from collage_monitor.diagnosis.evidence import Values, finite, labelled
from collage_monitor.diagnosis.problem import Bound, Problem
from collage_monitor.diagnosis.remedies import LOSS
from collage_monitor.diagnosis.words import MADE_BY_THE_STEP, percent
from collage_monitor.wire import Finding

__all__ = ["OF_AVERAGES", "PROBLEMS", "average_findings"]

_SMALL_EPS: Final = " (in float16 an eps below 3e-8 is 0: raise it, or keep the weights in float32)"
_WEIGHTS: Final = Bound("nonfinite_params", ">", 0.0)
_RESIDUALS: Final = Bound("residual_nonfinite", ">", 0.0)
_INFINITE: Final = Bound("state_infinite_ratio", ">", 0.0)
_SKIPPED: Final = Bound("skipped_steps", ">", 32.0)
_AVERAGE: Final = Bound("average_nonfinite", ">", 0.0)
_AVERAGE_LOST: Final = Bound("average_lost_ratio", ">", LOST_TOLERANCE)
_AVERAGE_LOW: Final = Bound("average_edq_ratio", "<", 1 - EDQ_TOLERANCE)
_AVERAGE_HIGH: Final = Bound("average_edq_ratio", ">", 1 + EDQ_TOLERANCE)


def _not_finite(case: Case) -> Iterator[Finding]:
    """NaN and infinity never leave a weight or a residual again. The finding also says whether a gradient brought
    them."""
    if count := case.number(_WEIGHTS.metric):
        held = {name: case.number(_WEIGHTS.metric, name) or 0.0 for name in case.evidence.layers}
        worst = max(held, key=lambda name: held[name], default=None)
        text = f"{count:,.0f} weights are NaN or infinite"
        if worst is not None and held[worst]:
            others = sum(map(bool, held.values())) - 1
            more = f" and {others} more layers" if others > 1 else " and another layer" if others else ""
            text += f", in {worst}{more}"
        if case.number("nonfinite_grads") == 0:
            narrow = case.trains("float16")
            text += f"; {MADE_BY_THE_STEP}" + (_SMALL_EPS if narrow else "")
        short = f"{count:,.0f} weights are not finite"
        yield Finding("not finite", text, _WEIGHTS.metric, count, 0.0, short=short)
    if count := case.number(_RESIDUALS.metric):
        text = f"{count:,.0f} residuals are NaN or infinite"
        short = f"{count:,.0f} residuals are not finite"
        yield Finding("not finite", text, _RESIDUALS.metric, count, 0.0, short=short)


def _states(case: Case) -> Iterator[Finding]:
    """A second moment in float16 overflows long before a weight does, and Adam divides by it: no update is left."""
    for name, share in labelled(case.model, _INFINITE.metric).items():
        key, bound = f"{_INFINITE.metric}/{name}", _INFINITE.threshold
        now = finite(case.evidence.now.get(key))
        if share > bound:
            short = f"{name} is infinite in {percent(now or share)} of the elements"
            text = f"{short}, whose updates are 0: it is kept in float16, which ends at 65,504"
            yield Finding("not finite", text, key, share, bound, short=short, now=now)


def _skipped(case: Case) -> Iterator[Finding]:
    """A scale settles within a few steps; where it never does, no step is taken and the weights stand still."""
    if (skipped := case.all_skipped) > _SKIPPED.threshold:
        text = case.skipped_in_words
        yield Finding("not finite", text, _SKIPPED.metric, skipped, _SKIPPED.threshold, short=text)


def _not_finite_in_training(case: Case) -> Iterator[Finding]:
    for rule in (_not_finite, _states, _skipped):
        yield from rule(case)


def _logged(case: Case) -> Iterator[Finding]:
    """Losses that the training logs."""
    for name, step in case.evidence.logged.items():
        since = f", since step {step:,}"
        short = f"{name} {LOSS}"
        text = f"{short} since step {step:,}"
        yield Finding("not finite", text, name, None, short=short, since=step, since_words=since)


def average_findings(metrics: Values, name: str = "the average of the weights") -> Iterator[Finding]:
    """Findings against an average of the weights, which has updates of its own; they say nothing about the weights.
    name: that of another tensor that is updated by itself.

    An average that moves too little, although hardly any update is rounded away, has another decay than stated.
    """
    if broken := finite(metrics.get(_AVERAGE.metric)):
        text = f"{broken:,.0f} elements of {name} are NaN or infinite"
        yield Finding("average is off", text, _AVERAGE.metric, broken, 0.0, short="the average is not finite")
    edq, lost = finite(metrics.get("average_edq_ratio")), finite(metrics.get(_AVERAGE_LOST.metric))
    noise, moved = finite(metrics.get("average_edq_noise_ratio")), finite(metrics.get("average_moved_ratio"))
    if edq is None or abs(1 - edq) <= EDQ_TOLERANCE + 3 * (noise or 0.0):
        return
    if lost is not None and lost > _AVERAGE_LOST.threshold:
        text = f"{name} loses its updates: its EDQ is {edq:.3f}, {percent(lost)} of them are "
        text += f"rounded away, {percent(moved or 0.0)} of its elements ever moved"
        short = f"the average loses {percent(lost)}"
        yield Finding("average is off", text, _AVERAGE_LOST.metric, lost, _AVERAGE_LOST.threshold, short=short)
    else:
        text = f"{name} moves by {edq:.3f} of what its decay says: it is another decay, or sign"
        bound = _AVERAGE_LOW.threshold if edq < 1 else _AVERAGE_HIGH.threshold
        short = "the average has another decay"
        yield Finding("average is off", text, "average_edq_ratio", edq, bound, short=short)


def _average(case: Case) -> Iterator[Finding]:
    yield from average_findings(case.model)


def _always_infinite(evidence: IncidentEvidence) -> CauseVerdict:
    both = evidence.both(evidence.metric or "")
    if both is None:
        return left_open("how many there were before was not reported")
    clause = f"{text_of(both[0])} were not finite before, {text_of(both[1])} after"
    return supported(clause) if 0 < both[1] <= both[0] else ruled_out(clause)


def _another_decay(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("the decay that the code uses is not reported")


PROBLEMS: Final = (
    Problem.with_alert(
        "CollageNotFinite",
        _not_finite_in_training,
        _WEIGHTS,
        _RESIDUALS,
        _INFINITE,
        _SKIPPED,
        needs_updates=False,
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
    Problem(_logged, (), needs_updates=False),
)
OF_AVERAGES: Final = (
    Problem.with_alert(
        "CollageAverageOff",
        _average,
        _AVERAGE_LOST,
        _AVERAGE_LOW,
        _AVERAGE_HIGH,
        _AVERAGE,
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
)
