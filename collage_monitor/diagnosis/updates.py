"""Updates that do not arrive: in the descent as a whole, in their number, and layer by layer.

In each alert `checks[i]` weighs `other_causes[i]`. Names of alerts are fixed: stored incidents, silences and
Prometheus rules go by them. Bounds are stated in `docs/reference/verdict.md`, each with its case in
`tests/diagnosis/test_judgement.py`; sentences are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from collage_monitor.diagnosis.case import EDQ_TOLERANCE, LAYER_LOST, LAYER_TOLERANCE, LOST_TOLERANCE, Case
from collage_monitor.diagnosis.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    near_schedule_end,
    ruled_out,
    supported,
    text_of,
)
from collage_monitor.diagnosis.evidence import longest_window
from collage_monitor.diagnosis.problem import Bound, Problem
from collage_monitor.diagnosis.words import percent
from collage_monitor.wire import Finding

__all__ = ["EDQ_LOW", "LOST", "PROBLEMS", "STILL"]

_GOOD: Final = 0.9
"""From here on nearly all of the intended descent counts as arrived."""
_INTENDED: Final = 0.1
"""Share of the usual update of the run's last fifth below which one step's loss is none: in the last 6 % of a
cosine to zero, which hold less than a thousandth of all its rates. A rate lowered for good is usual soon."""
_ERROR_TOLERANCE: Final = 0.05
STILL: Final = 0.9995
"""Share of its updates that a layer loses which does not move at all."""
EDQ_LOW: Final = Bound("edq_ratio", "<", 1 - EDQ_TOLERANCE, alert_threshold=_GOOD)
_WINDOW_LOW: Final = Bound("edq_window_ratio", "<", 1 - EDQ_TOLERANCE, alert_threshold=_GOOD)
_WAY: Final = Bound("oracle_displacement_ratio", "<", 1 - EDQ_TOLERANCE, alert_threshold=_GOOD)
"""Where what is lost comes back later."""
_EDQ_HIGH: Final = Bound("edq_ratio", ">", 1 + EDQ_TOLERANCE, alert_threshold=math.inf)
LOST: Final = Bound("lost_update_ratio", ">", LOST_TOLERANCE, alert_threshold=0.25, to_nearest=True)
"""Of the trainings of docs/studies that round to nearest none lies between 0.16 and 0.28, and most of those beyond
end above fp32: docs/false-alarms.md."""
_OF_A_LAYER: Final = Bound("lost_update_ratio", ">", LAYER_LOST, alert_threshold=0.98, to_nearest=True)


def _descent(case: Case) -> Iterator[Finding]:
    """The paper's measure (Collage, arXiv 2405.03637): how much of the intended descent arrived.

    Over the longest window where one step misleads: more than the visible weight is kept, or rounding is random.
    """
    key, over = "edq_ratio", ""
    window = longest_window(case.model, "edq_window_ratio")
    edq = case.number(key)
    if case.feeds_back:
        key, way = _WAY.metric, case.number(_WAY.metric)
        if way is not None and way < _WAY.threshold:
            text = f"what rounding takes of a step comes back later, but not all: {way:.3f} of the oracle's way"
            yield Finding(
                "losing updates", text, key, way, _WAY.threshold, short=f"loses {percent(1 - way)} of its descent"
            )
        return
    if window is not None and (case.keeps_more_than_visible or case.stochastic or edq is None):
        key, over, edq = f"edq_window_ratio/{window[0]}", f" over {window[0]} steps", window[1]
    low, high = case.number(f"{key}_low"), case.number(f"{key}_high")
    if edq is None or (case.stochastic and case.edq_may_be_far_off and key == "edq_ratio"):
        return
    slack = EDQ_TOLERANCE + case.chance(key.replace("_ratio", "_noise_ratio"))
    now = case.moved(key)
    told = f"EDQ{over} is {edq:.3f}" + ("" if now is None else f" ({now:.3f} now)")
    if edq < 1 - slack and (high is None or high < 1 - EDQ_TOLERANCE):
        missing = 1 - (edq if now is None else now)
        short = f"loses {percent(missing)} of its descent" if missing > 0 else "lost part of its descent"
        text = f"{told}: updates are lost"
        yield Finding("losing updates", text, key, edq, 1 - EDQ_TOLERANCE, short=short, now=now)
    elif edq > 1 + slack and (low is None or low > 1 + EDQ_TOLERANCE) and not (case.couples and not over):
        text, short = f"{told}: updates overshoot", "updates overshoot"
        yield Finding("steps are off", text, key, edq, 1 + EDQ_TOLERANCE, short=short, now=now)


def _loss(case: Case) -> Iterator[Finding]:
    """The share lost, where rounding is to nearest: a later step then never makes up for a loss, unless windows of
    several steps show otherwise, as when the optimizer feeds its rounding errors back."""
    if case.arrives_later or case.feeds_back:
        return
    lost, error = case.lost_where(at_random=False)
    if lost is None or lost <= LOST.threshold or (error is not None and error <= _ERROR_TOLERANCE):
        return
    where = " of the layers that round to nearest" if case.differing else ""
    now = None if case.differing else case.moved(LOST.metric)
    told = percent(lost) + ("" if now is None else f" ({percent(now)} now)")
    short = f"loses {percent(lost if now is None else now)} of its updates"
    if now is not None and now <= LOST.threshold:
        short = f"lost {percent(lost)}, now {percent(now)}"
    text = f"{told} of the updates{where} are rounded away"
    yield Finding("losing updates", text, LOST.metric, lost, LOST.threshold, short=short, now=now)


def _layers(case: Case) -> Iterator[Finding]:
    """Layers that round to nearest and lose most of their updates, if those whose error says so, too, hold a share
    of Σ u² that is not negligible."""
    losing = case.losing_layers()
    by_error = [name for name in losing if (case.number("update_error_ratio", name) or 0.0) > LAYER_LOST]
    # An overshoot by more makes such an error by itself.
    by_error = [name for name in by_error if (case.number("edq_ratio", name) or 0.0) <= 1 + LAYER_LOST]
    if case.share_of(by_error) <= LAYER_TOLERANCE:
        return
    sizes = {name: case.number("elements", name) or 0.0 for name in case.evidence.layers if case.share_of([name])}
    shares = {name: case.number("lost_update_ratio", name) or 0.0 for name in losing}
    one, still = len(losing) == 1, all(share >= STILL for share in shares.values())
    many = "1 layer" if one else f"{len(losing)} layers"
    verb = ("stands" if one else "stand") if still else ("loses" if one else "lose")
    short = f"{many} {verb} {'still' if still else 'most'}"
    verb += " still" if still else f" most of {'its' if one else 'their'} updates"
    worst = losing[0]
    size = sum(sizes[name] for name in losing) / sum(sizes.values())
    share, more = case.share_of(losing), "" if one else ", …"
    text = f"{many} {verb} ({worst}{more}: {percent(size)} of the measured elements, {percent(share)} of Σ u²)"
    # Who is woken by one that stands still is told which.
    named = next((name for name in losing if shares[name] >= STILL), worst)
    yield Finding("losing updates", text, "lost_update_ratio", shares[named], LAYER_LOST, named, short=short)


def _warming_up(evidence: IncidentEvidence) -> CauseVerdict:
    rate, rising = evidence.both("learning_rate"), evidence.rising.get("learning_rate")
    if rate is None or rising is None:
        return left_open("learning_rate was not logged on both sides")
    clause = f"learning_rate was {text_of(rate[0])} before and {text_of(rate[1])} after"
    return supported(f"{clause}: it still rises") if rising else ruled_out(f"{clause}: it does not rise")


def _interval_is_wide(evidence: IncidentEvidence) -> CauseVerdict:
    high = evidence.now("edq_ratio_high")
    if high is None:
        return left_open("edq_ratio has no interval here")
    clause = f"the interval of edq_ratio reaches up to {text_of(high)}"
    return supported(clause) if high > 0.9 else ruled_out(clause)


def _rounds_at_random(evidence: IncidentEvidence) -> CauseVerdict:
    fingerprint = evidence.watch.fingerprint if evidence.watch else None
    seen = fingerprint.stochastic_rounding if fingerprint else None
    if seen is None and fingerprint and any(fingerprint.layer_rounds_at_random.values()):
        return left_open("some layers round at random, others to nearest")
    if seen is None:
        return left_open("the agent could not see how weights are rounded")
    return supported("stochastic rounding was seen") if seen else ruled_out("rounding to nearest was seen")


def _standing(evidence: IncidentEvidence) -> list[str]:
    found = {name: values.get("edq_ratio") for name, values in evidence.layers.items()}
    return [name for name, edq in found.items() if isinstance(edq, float | int) and edq < 0.02]


def _norms_stand(evidence: IncidentEvidence) -> CauseVerdict:
    standing = _standing(evidence)
    if not standing:
        return left_open("no layer stands still in the steps after")
    norms = [name for name in standing if "norm" in f"{name} {evidence.types.get(name, '')}".lower()]
    clause = f"{len(norms)} of the {len(standing)} layers that stand still belong to a normalisation"
    return supported(clause) if len(norms) == len(standing) else ruled_out(clause)


def _frozen_in_effect(evidence: IncidentEvidence) -> CauseVerdict:
    sizes = {
        name: float(size)
        for name, values in evidence.layers.items()
        if isinstance(size := values.get("update_to_weight_ratio"), float | int)
    }
    standing = [name for name in _standing(evidence) if name in sizes]
    others = [size for name, size in sizes.items() if name not in standing]
    if not standing or not others:
        return left_open("update_to_weight_ratio of these and of other layers was not reported")
    share = max(sizes[name] for name in standing) / max(float(np.median(others)), np.finfo(float).tiny)
    clause = f"their updates, beside their weights, are {share:.3g} times those of other layers"
    return supported(clause) if share < 1e-3 else ruled_out(clause)


PROBLEMS: Final = (
    Problem.with_alert(
        "CollageEdqLow",
        _descent,
        EDQ_LOW,
        _WINDOW_LOW,
        _WAY,
        _EDQ_HIGH,
        for_seconds=600.0,
        least_intended_share=_INTENDED,
        severity="warning",
        on_by_default=True,
        summary="less than nine tenths of the intended descent reaches the weights",
        meaning=(
            "Rounding takes more than a tenth of the descent. The run trains as if with a smaller learning rate, "
            "but not evenly: small updates are lost, large ones arrive."
        ),
        other_causes=(
            "a learning-rate warm-up longer than the alert's: early updates are small by intent",
            "few sampled elements: check whether the 95 % interval of edq_ratio reaches above 0.9",
        ),
        checks=(_warming_up, _interval_is_wide),
        first_step=(
            "Look at lost_update_ratio and half_ulp_margin of the worst layers. If their updates are below half a "
            "gap, switch to a strategy that keeps more of the weights (split-master or master-weights) at the next "
            "checkpoint."
        ),
    ),
    Problem.with_alert(
        "CollageUpdatesLost",
        _loss,
        LOST,
        for_seconds=600.0,
        severity="warning",
        on_by_default=True,
        summary="more than a quarter of the intended updates are rounded away",
        meaning=(
            "In the recent past more than a quarter of the weights that should have moved in a step did not, "
            "and no later step makes up for it. In our studies 28 of 33 such settings ended above fp32, by "
            "up to 0.37 nats. Some had an edq_ratio of 0.98, because a few large updates dominate it while "
            "many small ones are lost. Where rounding is random, updates arrive on average, so this alert "
            "leaves such runs out: look at lost_window_ratio there."
        ),
        other_causes=(
            'the optimizer rounds stochastically without saying so: pass strategy="stochastic" to watch',
            "the end of a learning-rate schedule, where updates are small by intent",
        ),
        checks=(_rounds_at_random, near_schedule_end),
        first_step=(
            "Look at lost_update_ratio by layer. Keep more of the weights (split-master, light or master-weights) "
            "from the next checkpoint on. A higher learning rate loses less, if the training bears it."
        ),
    ),
    Problem.with_alert(
        "CollageLayersStandStill",
        _layers,
        _OF_A_LAYER,
        for_seconds=900.0,
        least_intended_share=_INTENDED,
        severity="warning",
        summary="a layer stands still: none of its intended updates arrives",
        meaning=(
            "At least one layer's updates are all below half a gap of its weights, so each is rounded away. "
            "The model's EDQ hides this, because other layers carry nearly all of the descent."
        ),
        other_causes=(
            "normalisation weights near 1 under a small learning rate: the gap is widest there",
            "a layer that is frozen in effect: its learning rate is next to nothing by intent",
        ),
        checks=(_norms_stand, _frozen_in_effect),
        first_step=(
            "Ask for the worst layers by edq_ratio. Keep those in a wider format, raise their learning rate, or "
            "switch to a strategy with a residual."
        ),
    ),
)
