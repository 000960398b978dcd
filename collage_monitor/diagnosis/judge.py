"""From evidence to a word: problems of the run, then doubts, then what speaks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from collage_monitor.diagnosis import residuals, states, updates, weights
from collage_monitor.diagnosis.advice import advice_of
from collage_monitor.diagnosis.case import Case
from collage_monitor.diagnosis.doubts import doubts, little_measured, nothing_but_decay, nothing_intended, witnesses
from collage_monitor.diagnosis.evidence import Evidence
from collage_monitor.diagnosis.judgement import judgement_of
from collage_monitor.diagnosis.problem import Problem
from collage_monitor.diagnosis.words import GRAVITY
from collage_monitor.metrics import split_key
from collage_monitor.wire import Finding, Judgement

__all__ = ["PROBLEMS", "judge"]

PROBLEMS: Final[tuple[Problem, ...]] = (
    *weights.PROBLEMS,
    *residuals.AT_A_RESUME,
    *updates.PROBLEMS,
    *states.PROBLEMS,
    *residuals.PROBLEMS,
    *weights.OF_AVERAGES,
)


def judge(evidence: Evidence) -> Judgement:
    """The judgement of the evidence; the same evidence gives the same words everywhere.

    One problem is enough for a bad verdict; the gravest comes first. Without one, a doubt makes it "unknown"; only
    a run with neither is "healthy". Weights kept in a way that is not understood make it "unknown", whatever the
    numbers.
    """
    case = Case(evidence)
    unexplained = case.fingerprint.unexplained if case.fingerprint else None
    if unexplained:
        text = "how weights are kept"
        return judgement_of(
            case, [Finding("unknown", unexplained, "unexplained", None, short=f"{text} is unknown")]
        )
    found = [finding for problem in PROBLEMS for finding in problem.findings(case)]
    unsure = [*nothing_but_decay(case), *(little_measured(case, _LEAST_MEASURED) if case.measured else ())]
    if unsure and found:
        certain = [own for problem in PROBLEMS if not problem.needs_updates for own in problem.findings(case)]
        found = certain or [*unsure, *(msgspec.structs.replace(own, health="unknown", alert="") for own in found)]
        if not certain:
            return msgspec.structs.replace(judgement_of(case, found), advice=advice_of(unsure[:1], case.watch))
    if found:
        against = _once_an_alert(sorted(found, key=_order))
        judged = judgement_of(case, against)
        return msgspec.structs.replace(judged, advice=advice_of(against, case.watch))
    rest = (list(doubts(case)) or list(witnesses(case))) if case.active else [nothing_intended(case)]
    return msgspec.structs.replace(judgement_of(case, rest), advice=advice_of(rest[:1], case.watch))


_LEAST_MEASURED: Final = 0.5
"""Share of the elements: of fewer no problem of their updates is that of the run."""
_PLACES: Final = {str(word): place for place, word in enumerate(GRAVITY)}
_TOLD_FIRST: Final = ("edq_window_ratio", "lost_update_ratio")
"""Of updates that are lost: what arrives over several steps, then their number. A weight that moves too little has
lost no update: told by their number, its run would lose next to nothing."""


def _order(finding: Finding) -> tuple[int, bool, int]:
    """The gravest first, and of a kind the one by which it is told."""
    name = split_key(finding.key)[0]
    told = _TOLD_FIRST.index(name) if name in _TOLD_FIRST and finding.layer is None else len(_TOLD_FIRST)
    return _PLACES[finding.health], finding.layer is not None, told


def _once_an_alert(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, of which only the first is an alert: one fault is one incident."""
    named: set[str] = set()
    once = []
    for finding in findings:
        once.append(msgspec.structs.replace(finding, alert="") if finding.alert in named else finding)
        named |= {finding.alert} - {""}
    return once
