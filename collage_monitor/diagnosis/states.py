"""The memory of an optimizer between steps: averages that cannot decay, sums that cannot grow, weight decay that is
lost, steps that drift from those of an fp64 optimizer.

In each alert `checks[i]` weighs `other_causes[i]`. Names of alerts are fixed: stored incidents, silences and
Prometheus rules go by them. Bounds are stated in `docs/reference/verdict.md`, each with its case in
`tests/diagnosis/test_judgement.py`; sentences are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from collage_monitor.diagnosis.case import Case
from collage_monitor.diagnosis.causes import (
    CauseVerdict,
    IncidentEvidence,
    left_open,
    near_schedule_end,
    rose,
    ruled_out,
    supported,
    text_of,
)
from collage_monitor.diagnosis.evidence import state_ratios
from collage_monitor.diagnosis.problem import Bound, Problem
from collage_monitor.diagnosis.words import oracle_reach, percent
from collage_monitor.metrics import STATE_RATIOS, split_key
from collage_monitor.wire import DECAYS_APART, Finding

__all__ = [
    "DECAY",
    "ORACLE_TOLERANCE",
    "PROBLEMS",
    "STATE_TOLERANCE",
    "noise_key",
    "rounds_decay",
    "state_in_words",
    "takes_rounding",
]

STATE_TOLERANCE: Final = 0.1
ORACLE_TOLERANCE: Final = 0.05
_OWN_DECAY: Final = frozenset({"foreach", "for-loop"})
"""Implementations of a step that decay weights in a separate operation."""
_WIDE_OWN_DECAY: Final = _OWN_DECAY | {"fused"}
"""Those that round it so, too, where weights are float32: a fused kernel computes in float32."""
_INTENDED: Final = 0.1
"""The same as in `updates.py`."""
_CATCHES_UP_STEPS: Final = 3000
"""Three time constants of a second moment at β₂ = 0.999: until then an oracle's still shows how it began."""
_STUCK: Final = Bound("state_decrement_ratio", "<", 1 - STATE_TOLERANCE, alert_threshold=-math.inf)
_SECOND_MOMENT: Final = Bound("state_decrement_ratio/exp_avg_sq", "<", 1 - STATE_TOLERANCE, alert_threshold=0.5)
_FAST: Final = Bound("state_decrement_ratio", ">", 1 + STATE_TOLERANCE, alert_threshold=math.inf)
_INCREMENT: Final = STATE_RATIOS[1]
_SUM_SLOW: Final = Bound(_INCREMENT, "<", 1 - STATE_TOLERANCE, alert_threshold=0.5)
_SUM_FAST: Final = Bound(_INCREMENT, ">", 1 + STATE_TOLERANCE, alert_threshold=math.inf)
DECAY: Final = Bound("decay_ratio", "<", 0.5)
_ORACLE_LOW: Final = Bound("edq_oracle_ratio", "<", 1 - ORACLE_TOLERANCE, alert_threshold=0.75, to_nearest=True)
_ORACLE_HIGH: Final = Bound("edq_oracle_ratio", ">", 1 + ORACLE_TOLERANCE, alert_threshold=1.25, to_nearest=True)


def noise_key(key: str) -> str:
    """The key of the standard error of a state's ratio where states are rounded at random."""
    return key.replace("_ratio/", "_noise_ratio/")


def state_in_words(case: Case, key: str, value: float) -> tuple[str, str]:
    """(what is wrong, "" if nothing; a clause that says it) for a state whose decrements, or whose increments if it
    is a sum, are `value` times the intended ones; `key`: that of the ratio."""
    metric, name = split_key(key)
    value, slack = _judged(case, key, value), STATE_TOLERANCE + case.chance(noise_key(key))
    moves = "grows" if metric == _INCREMENT else "decays"
    if abs(1 - value) > slack and takes_rounding(case, name or ""):
        return "", "takes what rounding leaves of the weights"
    if value < 1 - slack:
        return "is stuck", f"does not {moves[:-1]} as it should"
    if value > 1 + slack:
        return f"{moves} too fast", f"{moves} too fast"
    return "", f"{moves} as it should" if abs(1 - value) <= STATE_TOLERANCE else "is off by what chance may do"


def _judged(case: Case, key: str, value: float) -> float:
    """The newest steps' ratio of a sum, if it is lower: what a sum once missed it never gets back."""
    now = case.moved(key) if split_key(key)[0] == _INCREMENT else None
    return value if now is None else min(value, now)


def takes_rounding(case: Case, name: str) -> bool:
    """Whether an average in float32, whose decay no rounding stops, takes what rounding leaves of the weights."""
    kept = None if case.fingerprint is None else case.fingerprint.states.get(name)
    return kept == "float32" and case.feeds_back


def _states(case: Case) -> Iterator[Finding]:
    """Find averages that decay too little or too fast, and sums that grow so. Changes below half a gap are rounded
    away: an average can only grow, and steps become too small; a sum stands still, and steps stay too large. EDQ
    trusts the stored state, so it cannot see this."""
    for key, value in state_ratios(case.model).items():
        wrong, clause = state_in_words(case, key, value)
        if not wrong:
            continue
        metric, name = split_key(key)
        now, slack = case.moved(key), STATE_TOLERANCE + case.chance(noise_key(key))
        moved, judged = "" if now is None else f", {now:.3f} now", _judged(case, key, value)
        health, bound = ("states are stuck", 1 - slack) if judged < 1 else ("steps are off", 1 + slack)
        text = f"the state {name} {clause} ({value:.3f}{moved})"
        sums = metric == _INCREMENT
        if sums and 0 < judged < 1:
            text += f": steps that divide by its root tend to {judged**-0.5:.2f} times the right length"
        if value < 0:
            own, other = ("shrinks", "grow") if sums else ("grows", "shrink")
            wrong = f"{own} instead"
            text = f"the state {name} {own} where it should {other}, by {-value:.2f} times as much"
        yield Finding(health, text, key, judged, bound, short=f"{name} {wrong}", now=now)


def rounds_decay(case: Case) -> frozenset[str]:
    """The implementations of a step that round weight decay by itself, in the weights' dtype."""
    wide = case.fingerprint is not None and set(case.fingerprint.parameters) == {"float32"}
    return _WIDE_OWN_DECAY if wide else _OWN_DECAY


def _decay(case: Case) -> Iterator[Finding]:
    """Find weight decay that is rounded away because it is a separate operation, as in torch's optimizers."""
    kept, fingerprint = case.number(DECAY.metric), case.fingerprint
    if kept is None or kept >= DECAY.threshold or fingerprint is None or case.watch is None:
        return
    ways = set(fingerprint.implementation.split(" and "))
    separate = ways <= rounds_decay(case) and case.watch.intent != "rule"
    if ways == {DECAYS_APART} or (separate and not case.keeps_more_than_visible and not case.stochastic):
        text = f"weight decay moves next to nothing ({percent(kept)} of it is kept)"
        yield Finding("decay is lost", text, DECAY.metric, kept, DECAY.threshold, short="weight decay is lost")


def _oracle(case: Case) -> Iterator[Finding]:
    """Compare with an fp64 optimizer that has its own weights and states: it shows every error in a state."""
    key = "edq_oracle_ratio"
    value, low, high = (case.number(name) for name in (key, f"{key}_low", f"{key}_high"))
    if value is None:
        return
    slack, now = ORACLE_TOLERANCE + case.chance("edq_oracle_noise_ratio"), case.moved(key)
    reach = oracle_reach(case.followed_by_oracle)
    text = f"EDQ against the oracle is {value:.3f}{reach}" + ("" if now is None else f" ({now:.3f} now)")
    short = "steps are not the oracle's"
    if value < 1 - slack and (high is None or high < 1 - ORACLE_TOLERANCE):
        yield Finding("steps are off", text, key, value, 1 - ORACLE_TOLERANCE, short=short, now=now)
    elif value > 1 + slack and (low is None or low > 1 + ORACLE_TOLERANCE):
        yield Finding("steps are off", text, key, value, 1 + ORACLE_TOLERANCE, short=short, now=now)


def _gradients_grow(evidence: IncidentEvidence) -> CauseVerdict:
    return rose(evidence, "grad_norm", by=0.5)


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


PROBLEMS: Final = (
    Problem.with_alert(
        "CollageSecondMomentStuck",
        _states,
        _STUCK,
        _SECOND_MOMENT,
        _FAST,
        _SUM_SLOW,
        _SUM_FAST,
        for_seconds=900.0,
        severity="warning",
        on_by_default=True,
        summary="the second moment decays, or its sum grows, less than half as much as it should",
        meaning=(
            "Its format rounds these changes away. An average can grow, but hardly shrink: as gradients fall, "
            "steps become too small. A sum, as Adagrad's, stands still: steps stay too large. edq_ratio still "
            "reads 1."
        ),
        other_causes=(
            "gradients that grow in every step: few elements of an average should have shrunk, and the ratio is "
            "noisy",
        ),
        checks=(_gradients_grow,),
        first_step=(
            "Follow the run's advice, which names a way to keep the second moment that fits the optimizer. "
            "Or lower the β₂ of an average to a value that the format can decay."
        ),
    ),
    Problem.with_alert(
        "CollageDecayLost",
        _decay,
        DECAY,
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
    Problem.with_alert(
        "CollageOracleDrift",
        _oracle,
        _ORACLE_LOW,
        _ORACLE_HIGH,
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
