"""What speaks against a run. Each rule is a function of the evidence; one finding is enough for a bad verdict.

`judge.py` asks each in the order given here. Rules and bounds are fixed by `docs/reference/verdict.md`, and every
one has its case in `tests/contract/test_judgement.py`; sentences are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from collage_monitor.judgement.evidence import Values, finite, longest_window, state_decrements
from collage_monitor.judgement.judged_run import EDQ_TOLERANCE, LAYER_LOST, LAYER_TOLERANCE, LOST_TOLERANCE, Case
from collage_monitor.judgement.words import STILL, Finding, Health, percent

__all__ = [
    "DECAY_TOLERANCE",
    "LOST_TOLERANCE",
    "ORACLE_TOLERANCE",
    "OWN_DECAY",
    "STATE_TOLERANCE",
    "average_findings",
    "findings_against",
]

_ERROR_TOLERANCE: Final = 0.05
STATE_TOLERANCE: Final = 0.1
DECAY_TOLERANCE: Final = 0.5
OWN_DECAY: Final = frozenset({"foreach", "for-loop"})
"""Implementations of a step that decay weights by an operation of its own."""
ORACLE_TOLERANCE: Final = 0.05
_FILL_TOLERANCE: Final = 2.0
_SMALL_EPS: Final = " (in float16 an eps below 3e-8 is 0: raise it, or keep the weights in float32)"
_DROPPED_TOLERANCE: Final = 0.4
"""Below a half, of which chance leaves some at 0. Updates of one size, as Lion's, add up to 0 now and then."""
_FEWEST_RESIDUALS: Final = 32
"""Elements of a layer that is asked by itself: of fewer all may have come to 0 so."""


def findings_against(case: Case) -> Iterator[Finding]:
    """Every finding that alone makes a bad verdict."""
    yield from _not_finite(case)
    yield from _lost_at_a_resume(case)
    if case.active:
        for rule in (
            _descent,
            _loss,
            _layers,
            _states,
            _decay,
            _residual_fill,
            _residuals_dropped,
            _residuals_empty,
            _oracle,
        ):
            yield from rule(case)
        yield from average_findings(case.model)


def _not_finite(case: Case) -> Iterator[Finding]:
    """NaN and infinity never leave a weight or a residual again. The finding also says whether a gradient brought
    them."""
    count, key = case.number("nonfinite_params"), "nonfinite_params"
    if count:
        held = {name: case.number(key, name) or 0.0 for name in case.evidence.layers}
        worst = max(held, key=lambda name: held[name], default=None)
        text = f"{count:,.0f} weights are NaN or infinite"
        if worst is not None and held[worst]:
            others = sum(map(bool, held.values())) - 1
            more = f" and {others} more layers" if others > 1 else " and another layer" if others else ""
            text += f", in {worst}{more}"
        if case.number("nonfinite_grads") == 0:
            narrow = case.trains("float16")
            text += "; the gradients were finite, so the step made them" + (_SMALL_EPS if narrow else "")
        yield Finding("not finite", text, key, count, 0.0)
    if count := case.number("residual_nonfinite"):
        text = f"{count:,.0f} residuals are NaN or infinite"
        yield Finding("not finite", text, "residual_nonfinite", count, 0.0)


def _lost_at_a_resume(case: Case) -> Iterator[Finding]:
    """A single loss counts as long as the recent past reaches back to it; a lasting one, for the launch."""
    losses = case.watch.resume_losses if case.watch else []
    first = case.evidence.first_step
    for loss in losses:
        if loss.lasting or (first is not None and first <= loss.step):
            health: Health = "residuals are off" if loss.kind in ("masters", "residuals") else "steps are off"
            yield Finding(health, loss.text, "resume_losses", float(len(losses)), 0.0)


def _descent(case: Case) -> Iterator[Finding]:
    """The paper's measure (Collage, arXiv 2405.03637): how much of the intended descent arrived.

    Over the longest window where one step misleads: more than the visible weight is kept, or rounding is random.
    """
    key, over = "edq_ratio", ""
    window = longest_window(case.model, "edq_window_ratio")
    edq = case.number(key)
    if window is not None and (case.keeps_more_than_visible or case.stochastic or edq is None):
        key, over, edq = f"edq_window_ratio/{window[0]}", f" over {window[0]} steps", window[1]
    low, high = case.number(f"{key}_low"), case.number(f"{key}_high")
    if edq is None or (case.stochastic and case.edq_may_be_far_off and key == "edq_ratio"):
        return
    slack = EDQ_TOLERANCE + case.chance(key.replace("_ratio", "_noise_ratio"))
    if edq < 1 - slack and (high is None or high < 1 - EDQ_TOLERANCE):
        yield Finding("losing updates", f"EDQ{over} is {edq:.3f}: updates are lost", key, edq, 1 - EDQ_TOLERANCE)
    elif edq > 1 + slack and (low is None or low > 1 + EDQ_TOLERANCE):
        yield Finding("steps are off", f"EDQ{over} is {edq:.3f}: updates overshoot", key, edq, 1 + EDQ_TOLERANCE)


def _loss(case: Case) -> Iterator[Finding]:
    """The share lost, where rounding is to nearest: a later step then never makes up for a loss, unless windows of
    several steps show otherwise, as when the optimizer feeds its rounding errors back."""
    if case.arrives_later:
        return
    lost, error = case.lost_where(at_random=False)
    if lost is not None and lost > LOST_TOLERANCE and (error is None or error > _ERROR_TOLERANCE):
        where = " of the layers that round to nearest" if case.differing else ""
        text = f"{percent(lost)} of the updates{where} are rounded away"
        yield Finding("losing updates", text, "lost_update_ratio", lost, LOST_TOLERANCE)


def _layers(case: Case) -> Iterator[Finding]:
    """Layers that round to nearest and lose most of their updates, if their share of Σ u² is not negligible."""
    if case.arrives_later:
        return
    losing = case.losing_layers()
    share = case.share_of(losing)
    if share <= LAYER_TOLERANCE:
        return
    sizes = {name: case.number("elements", name) or 0.0 for name in case.evidence.layers if case.share_of([name])}
    # By lost energy, Σu² − Σue, as wherever layers are ordered by what they lose.
    losing.sort(key=lambda name: -case.share_of([name]) * (1 - (case.number("edq_ratio", name) or 0.0)))
    worst = losing[0]
    lost = case.number("lost_update_ratio", worst)
    still = all((case.number("lost_update_ratio", name) or 0.0) >= STILL for name in losing)
    many = "1 layer" if len(losing) == 1 else f"{len(losing)} layers"
    verb = (
        ("stands still" if still else "loses most of its updates")
        if len(losing) == 1
        else ("stand still" if still else "lose most of their updates")
    )
    size = sum(sizes[name] for name in losing) / sum(sizes.values())
    more = ", …" if len(losing) > 1 else ""
    text = f"{many} {verb} ({worst}{more}: {percent(size)} of the measured elements, {percent(share)} of Σ u²)"
    yield Finding("losing updates", text, "lost_update_ratio", lost, LAYER_LOST, worst)


def _states(case: Case) -> Iterator[Finding]:
    """A moving average in low precision whose decrements are below half a gap can only grow, and makes steps too
    small; EDQ trusts the stored state, so it cannot see this."""
    for name, value in state_decrements(case.model).items():
        tolerance = STATE_TOLERANCE + case.chance(f"state_decrement_noise_ratio/{name}")
        key = f"state_decrement_ratio/{name}"
        if value < 1 - tolerance:
            text = f"the state {name} does not decay as it should ({value:.3f})"
            yield Finding("states are stuck", text, key, value, 1 - tolerance)
        elif value > 1 + tolerance:
            text = f"the state {name} decays too fast ({value:.3f})"
            yield Finding("steps are off", text, key, value, 1 + tolerance)


def _decay(case: Case) -> Iterator[Finding]:
    """Decay that the optimizer applies to the weights as a separate, rounded operation, as torch's optimizers
    do."""
    kept, seen = case.number("decay_ratio"), case.fingerprint
    if kept is None or kept >= DECAY_TOLERANCE or seen is None or case.watch is None:
        return
    apart = set(seen.implementation.split(" and ")) <= OWN_DECAY and case.watch.intent != "rule"
    if apart and not case.keeps_more_than_visible and not case.stochastic:
        text = f"weight decay moves next to nothing ({percent(kept)} of it is kept)"
        yield Finding("decay is lost", text, "decay_ratio", kept, DECAY_TOLERANCE)


def _residual_fill(case: Case) -> Iterator[Finding]:
    """Rounding to nearest leaves a residual of at most half a gap, truncation one of up to a whole gap."""
    fill = case.number("residual_fill_ratio")
    if fill is not None and fill > _FILL_TOLERANCE:
        text = f"the residuals hold {fill:.3g} half gaps each, where what rounding leaves is at most one"
        yield Finding("residuals are off", text, "residual_fill_ratio", fill, _FILL_TOLERANCE)


def _residuals_dropped(case: Case) -> Iterator[Finding]:
    """A residual carries part of one step to the next; if it is 0 again before that, this part never arrives."""
    key = "residual_dropped_ratio"
    if (dropped := case.number(key) or 0.0) > _DROPPED_TOLERANCE * (1 - case.idle):
        text = f"{percent(dropped)} of the residuals were 0 again before a step: what they kept was dropped"
        yield Finding("residuals are off", text, key, dropped, _DROPPED_TOLERANCE)
        return
    large = [name for name in case.evidence.layers if (case.number("elements", name) or 0.0) >= _FEWEST_RESIDUALS]
    shares = {name: case.number(key, name) or 0.0 for name in large}
    squares = {name: (case.number("intended_norm", name) or 0.0) ** 2 for name in shares}
    emptied = sorted(
        (name for name in shares if shares[name] > _DROPPED_TOLERANCE), key=lambda name: -squares[name]
    )
    if sum(squares[name] for name in emptied) > LAYER_TOLERANCE * sum(squares.values()):
        worst, others = emptied[0], len(emptied) - 1
        more = f" and of {others} more layers" if others > 1 else " and of another layer" if others else ""
        text = f"{percent(shares[worst])} of the residuals of {worst}{more} were 0 again before a step: what they "
        text += "kept was dropped"
        yield Finding("residuals are off", text, key, shares[worst], _DROPPED_TOLERANCE, worst)


def _residuals_empty(case: Case) -> Iterator[Finding]:
    """EDQ counts updates in a residual as arrived. If each step finds the residuals at 0, only the movement of the
    visible weights counts."""
    zero = case.number("residual_zero_ratio")
    # Elements that are never stepped have a residual of 0.
    threshold = case.idle + 0.5 * (1 - case.idle)
    dropped = case.number("residual_dropped_ratio")
    held = dropped is None or dropped > _DROPPED_TOLERANCE * (1 - case.idle)
    # None was there before a conversion, or before the first step that moves weights.
    if zero is None or zero <= threshold or case.one_step or not held:
        return
    lost = case.number("lost_visible_ratio")
    if lost is not None and lost > LOST_TOLERANCE:
        text = (
            f"{percent(zero)} of the residuals are 0 before a step: what they kept is dropped, and {percent(lost)} "
            "of the updates do not move the weights"
        )
        yield Finding("losing updates", text, "residual_zero_ratio", zero, threshold)


def _oracle(case: Case) -> Iterator[Finding]:
    """An fp64 optimizer with weights and states of its own sees every error that has ever entered the state."""
    key = "edq_oracle_ratio"
    value, low, high = (case.number(name) for name in (key, f"{key}_low", f"{key}_high"))
    if value is None:
        return
    slack = ORACLE_TOLERANCE + case.chance("edq_oracle_noise_ratio")
    text = f"EDQ against the oracle is {value:.3f}"
    if value < 1 - slack and (high is None or high < 1 - ORACLE_TOLERANCE):
        yield Finding("steps are off", text, key, value, 1 - ORACLE_TOLERANCE)
    elif value > 1 + slack and (low is None or low > 1 + ORACLE_TOLERANCE):
        yield Finding("steps are off", text, key, value, 1 + ORACLE_TOLERANCE)


def average_findings(metrics: Values) -> Iterator[Finding]:
    """Findings against an average of the weights, which has updates of its own; they say nothing about the weights.

    An average that moves too little, although hardly any update is rounded away, has another decay than stated.
    """
    if broken := finite(metrics.get("average_nonfinite")):
        text = f"{broken:,.0f} elements of the average of the weights are NaN or infinite"
        yield Finding("average is off", text, "average_nonfinite", broken, 0.0)
    edq, lost = finite(metrics.get("average_edq_ratio")), finite(metrics.get("average_lost_ratio"))
    noise, moved = finite(metrics.get("average_edq_noise_ratio")), finite(metrics.get("average_moved_ratio"))
    if edq is None or abs(1 - edq) <= EDQ_TOLERANCE + 3 * (noise or 0.0):
        return
    if lost is not None and lost > LOST_TOLERANCE:
        text = f"the average of the weights loses its updates: its EDQ is {edq:.3f}, {percent(lost)} of them are "
        text += f"rounded away, {percent(moved or 0.0)} of its elements ever moved"
        yield Finding("average is off", text, "average_lost_ratio", lost, LOST_TOLERANCE)
    else:
        text = f"the average of the weights moves by {edq:.3f} of what its decay says: it is another decay, or sign"
        bound = 1 - EDQ_TOLERANCE if edq < 1 else 1 + EDQ_TOLERANCE
        yield Finding("average is off", text, "average_edq_ratio", edq, bound)
