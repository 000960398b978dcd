"""What is kept beside the weights: residuals that are dropped or do not fit, and what a resume lost.

In each alert `checks[i]` weighs `other_causes[i]`. Names of alerts are fixed: stored incidents, silences and
Prometheus rules go by them. Bounds are stated in `docs/reference/verdict.md`, each with its case in
`tests/diagnosis/test_judgement.py`; sentences are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from collage_monitor.diagnosis.case import LAYER_TOLERANCE, LOST_TOLERANCE, Case
from collage_monitor.diagnosis.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    loaded_anew,
    rose,
    ruled_out,
    supported,
)
from collage_monitor.diagnosis.launch import health_of, short_of
from collage_monitor.diagnosis.problem import Bound, Problem
from collage_monitor.diagnosis.words import percent
from collage_monitor.wire import Finding

__all__ = ["AT_A_RESUME", "DROPPED", "FEWEST_RESIDUALS", "FILL", "PROBLEMS"]

FEWEST_RESIDUALS: Final = 32
"""Elements of a layer that is asked by itself: of fewer all may have come to 0 so."""
FILL: Final = Bound("residual_fill_ratio", ">", 2.0)
DROPPED: Final = Bound("residual_dropped_ratio", ">", 0.4)
"""Of the elements that are not idle. Below a half, of which chance leaves some at 0: updates of one size, as
Lion's, add up to 0 now and then."""
_EMPTY: Final = Bound("residual_zero_ratio", ">", 0.5)
"""Of the elements that are not idle."""
_LOST_AT_A_RESUME: Final = Bound("resume_losses", ">", 0.0)


def _lost_at_a_resume(case: Case) -> Iterator[Finding]:
    """A single loss counts as long as the recent past reaches back to it; a lasting one, for the launch."""
    losses = case.watch.resume_losses if case.watch else []
    first = case.evidence.first_step
    for loss in losses:
        if loss.lasting or (first is not None and first <= loss.step):
            key, count = _LOST_AT_A_RESUME.metric, float(len(losses))
            yield Finding(health_of(loss), loss.text, key, count, 0.0, short=short_of(loss))


def _fill(case: Case) -> Iterator[Finding]:
    """Rounding to nearest leaves a residual of at most half a gap, truncation one of up to a whole gap."""
    fill = case.number(FILL.metric)
    if fill is not None and fill > FILL.threshold:
        text = f"the residuals hold {fill:.3g} half gaps each, where what rounding leaves is at most one"
        yield Finding("residuals are off", text, FILL.metric, fill, FILL.threshold, short="residuals hold too much")


def _dropped(case: Case) -> Iterator[Finding]:
    """A residual carries part of one step to the next; if it is 0 again before that, this part never arrives."""
    key, bound, short = DROPPED.metric, DROPPED.threshold * (1 - case.idle), "residuals were dropped"
    told = "were 0 again before a step: what they kept was dropped"
    if (dropped := case.number(key) or 0.0) > bound:
        text = f"{percent(dropped)} of the residuals {told}"
        yield Finding("residuals are off", text, key, dropped, bound, short=short)
        return
    large = [name for name in case.evidence.layers if (case.number("elements", name) or 0.0) >= FEWEST_RESIDUALS]
    shares = {name: case.number(key, name) or 0.0 for name in large}
    squares = {name: (case.number("intended_norm", name) or 0.0) ** 2 for name in shares}
    emptied = sorted((name for name in shares if shares[name] > DROPPED.threshold), key=lambda name: -squares[name])
    if sum(squares[name] for name in emptied) > LAYER_TOLERANCE * sum(squares.values()):
        worst, others = emptied[0], len(emptied) - 1
        more = f" and of {others} more layers" if others > 1 else " and of another layer" if others else ""
        text = f"{percent(shares[worst])} of the residuals of {worst}{more} {told}"
        yield Finding("residuals are off", text, key, shares[worst], DROPPED.threshold, worst, short=short)


def _empty(case: Case) -> Iterator[Finding]:
    """EDQ counts updates in a residual as arrived. If each step finds the residuals at 0, only the movement of the
    visible weights counts."""
    zero = case.number(_EMPTY.metric)
    # Elements that are never stepped have a residual of 0.
    threshold = case.idle + _EMPTY.threshold * (1 - case.idle)
    dropped = case.number(DROPPED.metric)
    held = dropped is None or dropped > DROPPED.threshold * (1 - case.idle)
    # None was there before a conversion, or before the first step that moves weights.
    if zero is None or zero <= threshold or case.one_step or not held:
        return
    lost = case.number("lost_visible_ratio")
    if lost is not None and lost > LOST_TOLERANCE:
        text = (
            f"{percent(zero)} of the residuals are 0 before a step: what they kept is dropped, and {percent(lost)} "
            "of the updates do not move the weights"
        )
        short = f"{percent(lost)} move no weight"
        yield Finding("losing updates", text, _EMPTY.metric, zero, threshold, short=short)


def _residuals(case: Case) -> Iterator[Finding]:
    for rule in (_fill, _dropped, _empty):
        yield from rule(case)


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


def _begun_anew(evidence: IncidentEvidence) -> CauseVerdict:
    losses = evidence.watch.resume_losses if evidence.watch else []
    if not losses:
        return left_open("what was lost was not reported")
    return left_open(f"{'; '.join(loss.text for loss in losses)}; whether that was meant is not reported")


AT_A_RESUME: Final = (
    Problem.with_alert(
        "CollageResumeLoss",
        _lost_at_a_resume,
        _LOST_AT_A_RESUME,
        needs_updates=False,
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
)

PROBLEMS: Final = (
    Problem.with_alert(
        "CollageResidualsOff",
        _residuals,
        FILL,
        DROPPED,
        _EMPTY,
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
        checks=(loaded_anew, _written_from_outside, _converted),
        first_step=(
            "Compare residual_dropped_ratio and residual_fill_ratio before and after the last resume. Save and "
            "load the optimizer's whole state, and resume from the last checkpoint that has the residuals."
        ),
    ),
)
