"""Reasons not to call a run healthy although no number is bad, and evidence for calling it healthy.

`judge.py` asks it after no problem was found. Rules and bounds are fixed by `docs/reference/verdict.md`
(`tests/diagnosis/test_judgement.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from collage_monitor.diagnosis.case import EDQ_TOLERANCE, LOST_TOLERANCE, Case
from collage_monitor.diagnosis.evidence import finite, labelled, state_ratios
from collage_monitor.diagnosis.remedies import IN_NO_OPTIMIZER, NO_GRADIENTS, OTHERS, RATE_0, SKIPPED, ZERO
from collage_monitor.diagnosis.states import (
    DECAY,
    ORACLE_TOLERANCE,
    STATE_TOLERANCE,
    noise_key,
    rounds_decay,
    state_in_words,
    takes_rounding,
)
from collage_monitor.diagnosis.words import is_named_by_group, oracle_reach, orphans, percent, silence
from collage_monitor.metrics import split_key
from collage_monitor.wire import Finding

__all__ = ["doubts", "little_measured", "nothing_but_decay", "nothing_intended", "witnesses"]

_MEASURED_TOLERANCE: Final = 0.1
_STILL: Final = 0.5
"""Share of the elements that do not move in a step: so many are told, also where nobody knows what should have."""
_HELD_BY_ALL: Final = 0.999
"""Share of the elements: beyond it the ranks that report hold the whole model."""
_EMPTY: Final = 0.01
"""Share of a state that is 0 where the gradient is not, from which it matters: one element may take a huge step."""
_WIDE: Final = re.compile("float(32|64)")
_INTENDED: Final = 0.1
"""Share of the recent past's norm of an update, below which that of the newest steps is next to nothing."""
_LEAST_FOLLOWED: Final = 0.5
"""Share of the elements: an oracle of fewer does not speak for the model."""
_SEVERAL_STEPS: Final = 8
"""In as many an average that is none of a sum had to shrink somewhere."""


def doubts(case: Case) -> Iterator[Finding]:
    """Every reason not to call a run healthy, each a function."""
    for doubt in (
        _silent_ranks,
        _at_the_launch,
        nothing_but_decay,
        _replaced,
        little_measured,
        _wide_interval,
        _no_interval,
        _moves_away,
        _unknown_rounding,
        _factored_states,
        _underflows,
        _decay_of_several,
        _no_second_witness,
    ):
        yield from doubt(case)


def nothing_intended(case: Case) -> Finding:
    """Why there is no u: each reason has its own sentence."""
    elements, layers = case.number("elements"), case.evidence.layers
    if skipped := case.all_skipped:
        return _doubt(case.skipped_in_words, SKIPPED, "skipped_steps", skipped)
    if not case.model:
        return _doubt("no step was measured yet", "no step measured yet", "measured_steps")
    if not elements and layers and all(map(is_named_by_group, layers)):
        text = "none of the optimizer's tensors belongs to the model, and none had a gradient: watch the optimizer "
        return _doubt(text + "that trains this model", OTHERS, "elements", elements)
    trained = [] if case.watch is None else case.watch.trained
    if not elements and trained and not any(entry.parameters for entry in trained):
        text = "the optimizer steps no watched layer that can be measured"
        return _doubt(text, "nothing that can be measured", "elements", elements)
    if not elements:
        text = "no watched layer had a gradient in the measured steps"
        return _doubt(text, NO_GRADIENTS, "elements", elements)
    if case.number("measured_ratio") is None:
        text = "only what changed is known, not what was intended: what was lost is unknown"
        still = case.number("unchanged_ratio")
        if still is not None and still > _STILL:
            text = f"{percent(still)} of the elements did not move in a step; what was intended is not known"
            return _doubt(text, f"{percent(still)} did not move", "unchanged_ratio", still, _STILL)
        return _doubt(text, "intended updates are unknown", "measured_ratio")
    gradient = case.number("grad_norm")
    text, short = "the learning rate was 0 in every measured step: gradients were not", RATE_0
    if case.watch is not None and case.watch.optimizer.startswith("Collage"):
        text += (
            "; a scheduler sets the rate of the optimizer that it was built with: build it after from_optimizer()"
        )
    if gradient is None:
        text, short = "every intended update was 0", "every intended update is 0"
    elif not gradient:
        return next(nothing_but_decay(case))
    return _doubt(text, short, "idle", case.number("idle"))


def nothing_but_decay(case: Case) -> Iterator[Finding]:
    """Every gradient was 0: what moves weights nevertheless, decay or a momentum of before, is no descent."""
    if case.number("grad_norm") == 0.0:
        text = "every gradient was 0 in the measured steps" + (
            ", and the weights move by decay or momentum alone" if case.active else ""
        )
        text += (
            ": look for a loss that does not depend on the weights, or for clipping by a norm that is not finite"
        )
        yield _doubt(text, ZERO, "idle", case.number("idle"))


def _doubt(text: str, short: str, key: str, value: float | None = None, threshold: float | None = None) -> Finding:
    return Finding("unknown", text, key, value, threshold, short=short)


def _silent_ranks(case: Case) -> Iterator[Finding]:
    """The elements of silent ranks may be sick, unless other ranks hold copies of them."""
    silent = case.evidence.silent
    if silent is not None and (silent.held is None or silent.held < _HELD_BY_ALL):
        text, short = (
            f"{silence(silent)}: what the others hold is not known",
            silence(silent).partition(" since")[0],
        )
        yield _doubt(text, f"only {short}", "elements", silent.held, _HELD_BY_ALL)


def _at_the_launch(case: Case) -> Iterator[Finding]:
    """What may have been lost at a resume counts as long as the recent past reaches back to it."""
    first = case.evidence.first_step
    for doubt in case.watch.launch_doubts if case.watch else []:
        if first is not None and first <= doubt.step:
            yield _doubt(doubt.text, doubt.short, "launch_doubts")


def _replaced(case: Case) -> Iterator[Finding]:
    """The optimizer steps a tensor that left the model, and not the one in its place."""
    coverage = case.watch.coverage if case.watch else None
    if coverage is not None and coverage.orphans and coverage.strangers:
        text = (
            f"{orphans(coverage)}, and the optimizer steps tensors of no module, without gradients, of shape "
            f"{' and '.join(coverage.strangers)}: build it after layers are replaced, resized or merged"
        )
        yield _doubt(text, f"{coverage.orphans[0]} {IN_NO_OPTIMIZER}", "elements", float(coverage.orphaned))


def little_measured(case: Case, least: float = 1 - _MEASURED_TOLERANCE) -> Iterator[Finding]:
    """Elements that were not measured may be sick."""
    measured = case.measured
    if measured is not None and measured < least:
        text = f"what was intended is known of {percent(measured)} of the elements only"
        coverage = case.watch.coverage if case.watch else None
        if coverage is not None and coverage.elsewhere:
            text += ": other optimizers, which nobody watches, step the rest; watch them, too"
        short = f"only {percent(measured)} is measured"
        yield _doubt(text, short, "measured_ratio", measured, 1 - _MEASURED_TOLERANCE)


def _wide_interval(case: Case) -> Iterator[Finding]:
    """EDQ is, or may be, off by more than twice its tolerance, and chance may be the reason."""
    edq, low, high = (case.number(key) for key in ("edq_ratio", "edq_ratio_low", "edq_ratio_high"))
    if case.feeds_back or (case.couples and case.number("edq_oracle_ratio") is not None):
        return
    if (edq is not None and abs(1 - edq) > EDQ_TOLERANCE) or (
        low is not None and high is not None and (low < 1 - 2 * EDQ_TOLERANCE or high > 1 + 2 * EDQ_TOLERANCE)
    ):
        text = f"EDQ {edq:.3f} is not known well enough" + ("" if low is None else f" ({low:.3f} to {high:.3f})")
        yield _doubt(text, "EDQ is not known well", "edq_ratio", edq, EDQ_TOLERANCE)


def _no_interval(case: Case) -> Iterator[Finding]:
    """A sample with heavy tails does not say how far off it is (`collage_monitor.statistics.intervals`)."""
    edq = case.number("edq_ratio")
    if edq is not None and case.edq_may_be_far_off:
        text = f"EDQ {edq:.3f} rests on a sample that cannot say how exact it is: watch with a larger sample="
        yield _doubt(text, "EDQ is not known well", "edq_ratio", edq)


def _moves_away(case: Case) -> Iterator[Finding]:
    """A number that is good over the recent past, and is not over its newest steps, unless those intend nothing."""
    now, usual = finite(case.evidence.now.get("intended_norm")), case.number("intended_norm")
    if now is None or usual is None or now < _INTENDED * usual:
        return
    for key, name in (("edq_ratio", "EDQ"), ("edq_oracle_ratio", "EDQ against the oracle")):
        value = case.moved(key)
        if value is not None and abs(1 - value) > EDQ_TOLERANCE:
            text = f"{name} is {value:.3f} now, {case.number(key) or 0.0:.3f} over these steps"
            yield Finding("unknown", text, key, value, EDQ_TOLERANCE, short=f"{name} is {value:.3f} now", now=value)


def _unknown_rounding(case: Case) -> Iterator[Finding]:
    """Later steps make up for the losses of stochastic rounding, but not for those of rounding to nearest."""
    lost, _ = case.lost_where(at_random=None)
    if lost is not None and lost > LOST_TOLERANCE:
        text = f"{percent(lost)} of the updates are rounded away in a step, and "
        if case.differing and not case.evidence.layers:
            text += "some layers round at random, others to nearest: which of them lose updates is not known"
        else:
            text += (
                "whether by stochastic rounding, whose updates arrive in the mean, is not known: declare strategy="
            )
        yield _doubt(text, "how it rounds is unknown", "lost_update_ratio", lost, LOST_TOLERANCE)


def _factored_states(case: Case) -> Iterator[Finding]:
    """A second moment kept by row and column can stand still like any other, and no number follows it."""
    kept = {} if case.fingerprint is None else case.fingerprint.factored
    narrow = [key for key, dtype in kept.items() if not _WIDE.fullmatch(dtype)]
    if narrow and case.number("edq_oracle_ratio") is None:
        dtypes = " and ".join(dict.fromkeys(kept[key] for key in narrow))
        text = (
            f"of states kept by row or column in {dtypes} ({', '.join(narrow)}) no number says whether they decay "
            "as they should: not known"
        )
        yield _doubt(text, "nothing follows its states", "states")


def _underflows(case: Case) -> Iterator[Finding]:
    """An average that is rounded to 0 forgets: steps divide by less than they should, and u is made of it, too."""
    kept = {} if case.fingerprint is None else case.fingerprint.states
    for name, share in labelled(case.model, "state_zero_ratio").items():
        if share > _EMPTY and kept.get(name) == "float16" and case.number("edq_oracle_ratio") is None:
            text = (
                f"{percent(share)} of the state {name} is rounded to 0 in float16 though its gradients are not 0: "
                "whether steps have the right size, only an oracle tells"
            )
            yield _doubt(text, f"{name} is rounded to 0", f"state_zero_ratio/{name}", share, _EMPTY)


def _decay_of_several(case: Case) -> Iterator[Finding]:
    """Several optimizers, only some of which decay weights by a separate operation."""
    kept = case.number("decay_ratio")
    ways = set(case.fingerprint.implementation.split(" and ")) if case.fingerprint else set()
    rounded = rounds_decay(case)
    if kept is not None and kept < DECAY.threshold and ways & rounded and ways - rounded:
        text = (
            f"weight decay by itself moves next to nothing ({percent(kept)} of it is kept), and only some of the "
            "optimizers decay so"
        )
        yield _doubt(text, "some weight decay is lost", "decay_ratio", kept, DECAY.threshold)


def _no_second_witness(case: Case) -> Iterator[Finding]:
    """EDQ cannot see an error that already sits in the optimizer's state."""
    edq = case.number("edq_ratio")
    if edq is not None and not list(witnesses(case))[1:]:
        text = f"EDQ reads {edq:.3f}, but no state decrement and no oracle confirms it: not known"
        yield _doubt(text, "nothing confirms its EDQ", "edq_ratio", edq)


def witnesses(case: Case) -> Iterator[Finding]:
    """What speaks for the run: EDQ, then each second witness."""
    edq, now = case.number("edq_ratio"), case.moved("edq_ratio")
    told = f"EDQ {edq:.3f}" + ("" if now is None else f", {now:.3f} now")
    if case.feeds_back:
        way = case.number("oracle_displacement_ratio") or 0.0
        told = f"what rounding took comes back: {way:.3f} of the oracle's way"
    yield _witness(f"updates arrive ({told})", "edq_ratio", edq, EDQ_TOLERANCE)
    for key, value in state_ratios(case.model).items():
        # A witness proves nothing if chance could have moved it here from 0.
        name = split_key(key)[1] or ""
        if STATE_TOLERANCE + case.chance(noise_key(key)) < 1 and not takes_rounding(case, name):
            text = f"{name} {state_in_words(case, key, value)[1]} ({value:.3f})"
            yield _witness(text, key, value, STATE_TOLERANCE)
    oracle = case.number("edq_oracle_ratio")
    # One that is off, if by what chance may do, confirms nothing; nor does one that moves.
    agrees = oracle is not None and abs(1 - oracle) <= ORACLE_TOLERANCE
    if agrees and case.moved("edq_oracle_ratio") is None and (share := case.followed_by_oracle) >= _LEAST_FOLLOWED:
        of = oracle_reach(share)
        yield _witness(f"the oracle agrees ({oracle:.3f}{of})", "edq_oracle_ratio", oracle, ORACLE_TOLERANCE)
    if kept := _kept_safely(case):
        yield _witness(f"the optimizer keeps {kept}", "states", None)


def _kept_safely(case: Case) -> str:
    """What an optimizer keeps whose states cannot go wrong by rounding; "" for others.

    A sum in 32 bits that never had to shrink is none that could; a moving average would have had to.
    """
    seen, first, last = case.fingerprint, case.evidence.first_step, case.evidence.last_step
    if seen is None or not seen.parameters:
        return ""
    averages = {name: dtype for name, dtype in seen.states.items() if name not in (seen.residual, seen.master)}
    if not averages:
        kept = "no state but what completes the weights" if seen.states else "no state that could go wrong"
        return "its states by row and column, in 32 bits" if seen.factored else kept
    grows = (
        not labelled(case.model, "state_decrement_ratio")
        and first is not None
        and (last or 0) - first >= _SEVERAL_STEPS
    )
    if grows and all(map(_WIDE.fullmatch, averages.values())) and not seen.factored:
        return f"{' and '.join(averages)} in 32 bits, and no element of it ever had to shrink"
    return ""


def _witness(text: str, key: str, value: float | None, threshold: float | None = None) -> Finding:
    return Finding("healthy", text, key, value, threshold, short="healthy")
