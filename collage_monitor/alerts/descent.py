"""Alerts on the descent: updates that do not arrive, in the model or in a layer, and steps that differ from the
oracle's.

In each alert `checks[i]` weighs `other_causes[i]`.

Names of alerts are fixed: stored incidents, silences and Prometheus rules go by them. A bound that changes needs
its case in `tests/alerts/traces.py`, and the generated rules and runbook.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

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
from collage_monitor.judgement import percent
from collage_monitor.strategies import STRATEGIES

__all__ = ["ALERTS"]

_GOOD = 0.9
"""From here on nearly all of the intended descent counts as arrived."""
_LOST = 0.25
"""Of the trainings of docs/studies that round to nearest none lies between 0.16 and 0.28, and most of those beyond
end above fp32: docs/false-alarms.md."""
_INTENDED = 0.1
"""Share of the usual update of the run's last fifth below which one step's loss is none: in the last 6 % of a
cosine to zero, which hold less than a thousandth of all its rates. A rate lowered for good is usual soon."""
_STOCHASTIC = "|".join(name for name, entry in STRATEGIES.items() if entry.stochastic)

_WINDOW_SETTLE_STEPS = 300
"""A window of 64 steps ends every 256 to 260: until then the newest is from before the resume."""
_CATCHES_UP_STEPS = 3000
"""Steps until an oracle's second moment, at β₂ = 0.999, is that of its own gradients: three time constants."""


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


def _window_is_short(evidence: IncidentEvidence) -> CauseVerdict:
    """An update of |u| = 2^margin half gaps needs 2^(1 - margin) steps for one gap."""
    margin, window = evidence.now("half_ulp_margin"), evidence.incident.labels.get("window", "")
    if margin is None or not window.isdigit():
        return left_open("half_ulp_margin or the window was not reported")
    needed = 2.0 ** (1 - margin)
    clause = f"the median update needs {needed:.3g} steps for one gap, the window has {window}"
    return supported(clause) if needed > int(window) else ruled_out(clause)


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


def _attached_late(evidence: IncidentEvidence) -> CauseVerdict:
    steps, last = evidence.now("oracle_steps"), evidence.after.last_step if evidence.after else None
    if steps is None or last is None or evidence.run is None:
        return left_open("oracle_steps was not reported")
    began = last - steps
    if began <= (evidence.run.first_step or 1):
        return ruled_out("the oracle is attached since the run began")
    clause = f"the oracle attached {text_of(steps)} steps before, in the middle of the run"
    return supported(clause) if steps < _CATCHES_UP_STEPS else ruled_out(f"{clause}: long enough to catch up")


def _oracle_restarted(evidence: IncidentEvidence) -> CauseVerdict:
    return rose(evidence, "oracle_restarts", by=0.0)


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
        "CollageEdqLow",
        Condition("collage_edq_ratio", "<", _GOOD),
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
    about_runs(
        "CollageUpdatesLost",
        # One step's share is no loss where rounding is random; the judgement sees it, and merges the recent past.
        finding_condition("lost_update_ratio", ">", _LOST, ("strategy", "!~", _STOCHASTIC)),
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
        "CollageLayersStandStill",
        Condition(
            "collage_worst_layer_edq_ratio",
            "<",
            0.02,
            labels=(("worst", "=", "1"), ("strategy", "!~", _STOCHASTIC)),
        ),
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
    about_runs(
        "CollageOracleDrift",
        Condition("collage_edq_oracle_ratio", ">", 0.25, "distance", labels=(("strategy", "!~", _STOCHASTIC),)),
        for_seconds=1800.0,
        least_intended_share=_INTENDED,
        severity="warning",
        summary="steps differ by more than a quarter from those of an optimizer in fp64",
        meaning=(
            "The oracle keeps its own weights and states in fp64 from the same gradients. The run's steps "
            "are a quarter smaller or larger than the oracle's, so an error has gathered in the optimizer's "
            "state."
        ),
        other_causes=(
            "the oracle attached in the middle of a run, and its states have not caught up",
            "weights that are written between steps: oracle_restarts counts how often the oracle began again",
        ),
        checks=(_attached_late, _oracle_restarted),
        first_step=(
            "Read state_decrement_ratio and oracle_step_norm_ratio. If a state does not decay, do what the run's "
            "advice says."
        ),
    ),
)
