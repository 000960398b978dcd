"""Reasons not to call a run healthy although no number is bad, and evidence for calling it healthy.

`judge.py` asks it after `rules.py` has found nothing. Rules and bounds are fixed by `docs/reference/verdict.md`
(`tests/contract/test_judgement.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from collage_monitor.judgement.evidence import state_decrements
from collage_monitor.judgement.judged_run import EDQ_TOLERANCE, Case
from collage_monitor.judgement.rules import (
    DECAY_TOLERANCE,
    LOST_TOLERANCE,
    ORACLE_TOLERANCE,
    OWN_DECAY,
    STATE_TOLERANCE,
)
from collage_monitor.judgement.words import Finding, percent, silence

__all__ = ["doubts", "nothing_intended", "witnesses"]

_MEASURED_TOLERANCE: Final = 0.1
_HELD_BY_ALL: Final = 0.999
"""Share of the elements: beyond it the ranks that report hold the whole model."""
_WIDE: Final = re.compile("float(32|64)")
_NAMED_BY_GROUP: Final = re.compile(r"(optimizer\d+\.)?group\d+\.\d+")
"""Names of tensors that the model does not know."""


def doubts(case: Case) -> Iterator[Finding]:
    """Every reason not to call a run healthy, each a function."""
    for doubt in (
        _silent_ranks,
        _little_measured,
        _wide_interval,
        _no_interval,
        _unknown_rounding,
        _factored_states,
        _decay_of_several,
        _no_second_witness,
    ):
        yield from doubt(case)


def nothing_intended(case: Case) -> Finding:
    """Why there is no u: each reason has its own sentence."""
    elements, layers = case.number("elements"), case.evidence.layers
    if not case.model:
        return Finding("unknown", "no step was measured yet", "measured_steps", None)
    if not elements and layers and all(_NAMED_BY_GROUP.fullmatch(name) for name in layers):
        text = "none of the optimizer's tensors belongs to the model, and none had a gradient: watch the optimizer "
        return Finding("unknown", text + "that trains this model", "elements", elements)
    trained = [] if case.watch is None else case.watch.trained
    if not elements and trained and not any(entry.parameters for entry in trained):
        text = "the optimizer steps no watched layer that can be measured"
        return Finding("unknown", text, "elements", elements)
    if not elements:
        return Finding("unknown", "no watched layer had a gradient in the measured steps", "elements", elements)
    if case.number("measured_ratio") is None:
        text = "only what changed is known, not what was intended: what was lost is unknown"
        return Finding("unknown", text, "measured_ratio", None)
    text = "every intended update was 0: gradients and decay are 0, or the learning rate is"
    return Finding("unknown", text, "idle", case.number("idle"))


def _silent_ranks(case: Case) -> Iterator[Finding]:
    """The elements of silent ranks may be sick, unless other ranks hold copies of them."""
    silent = case.evidence.silent
    if silent is not None and (silent.held is None or silent.held < _HELD_BY_ALL):
        text = f"{silence(silent)}: what the others hold is not known"
        yield Finding("unknown", text, "elements", silent.held, _HELD_BY_ALL)


def _little_measured(case: Case) -> Iterator[Finding]:
    """Elements that were not measured may be sick."""
    measured = case.measured
    if measured is not None and measured < 1 - _MEASURED_TOLERANCE:
        text = f"what was intended is known of {percent(measured)} of the elements only"
        yield Finding("unknown", text, "measured_ratio", measured, 1 - _MEASURED_TOLERANCE)


def _wide_interval(case: Case) -> Iterator[Finding]:
    """EDQ is, or may be, off by more than twice its tolerance, and chance may be the reason."""
    edq, low, high = (case.number(key) for key in ("edq_ratio", "edq_ratio_low", "edq_ratio_high"))
    if (edq is not None and abs(1 - edq) > EDQ_TOLERANCE) or (
        low is not None and high is not None and (low < 1 - 2 * EDQ_TOLERANCE or high > 1 + 2 * EDQ_TOLERANCE)
    ):
        text = f"EDQ {edq:.3f} is not known well enough" + ("" if low is None else f" ({low:.3f} to {high:.3f})")
        yield Finding("unknown", text, "edq_ratio", edq, EDQ_TOLERANCE)


def _no_interval(case: Case) -> Iterator[Finding]:
    """A sample with heavy tails does not say how far off it is (`collage_monitor.statistics.intervals`)."""
    edq = case.number("edq_ratio")
    if edq is not None and case.edq_may_be_far_off:
        text = f"EDQ {edq:.3f} rests on a sample that cannot say how exact it is: watch with a larger sample="
        yield Finding("unknown", text, "edq_ratio", edq)


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
        yield Finding("unknown", text, "lost_update_ratio", lost, LOST_TOLERANCE)


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
        yield Finding("unknown", text, "states", None)


def _decay_of_several(case: Case) -> Iterator[Finding]:
    """Several optimizers, only some of which decay weights by a separate operation."""
    kept = case.number("decay_ratio")
    ways = set(case.fingerprint.implementation.split(" and ")) if case.fingerprint else set()
    if kept is not None and kept < DECAY_TOLERANCE and ways & OWN_DECAY and ways - OWN_DECAY:
        text = (
            f"weight decay by itself moves next to nothing ({percent(kept)} of it is kept), and only some of the "
            "optimizers decay so"
        )
        yield Finding("unknown", text, "decay_ratio", kept, DECAY_TOLERANCE)


def _no_second_witness(case: Case) -> Iterator[Finding]:
    """EDQ cannot see an error that already sits in the optimizer's state."""
    edq = case.number("edq_ratio")
    if edq is not None and not list(witnesses(case))[1:]:
        text = f"EDQ reads {edq:.3f}, but no state decrement and no oracle confirms it: not known"
        yield Finding("unknown", text, "edq_ratio", edq)


def witnesses(case: Case) -> Iterator[Finding]:
    """What speaks for the run: EDQ, then each second witness."""
    edq = case.number("edq_ratio")
    yield Finding("healthy", f"updates arrive (EDQ {edq:.3f})", "edq_ratio", edq, EDQ_TOLERANCE)
    for name, value in state_decrements(case.model).items():
        key = f"state_decrement_ratio/{name}"
        # A witness that chance could bring from 0 to here says nothing.
        if STATE_TOLERANCE + case.chance(f"state_decrement_noise_ratio/{name}") < 1:
            told = "decays as it should" if abs(1 - value) <= STATE_TOLERANCE else "is off by what chance may do"
            yield Finding("healthy", f"{name} {told} ({value:.3f})", key, value, STATE_TOLERANCE)
    oracle = case.number("edq_oracle_ratio")
    # One that is off, if by what chance may do, confirms nothing.
    if oracle is not None and abs(1 - oracle) <= ORACLE_TOLERANCE:
        text = f"the oracle agrees ({oracle:.3f})"
        yield Finding("healthy", text, "edq_oracle_ratio", oracle, ORACLE_TOLERANCE)
    seen = case.fingerprint
    if seen is not None and seen.parameters and not seen.states:
        kept = "its states by row and column, in 32 bits" if seen.factored else "no state that could go wrong"
        yield Finding("healthy", f"the optimizer keeps {kept}", "states", None)
