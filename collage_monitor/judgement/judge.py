"""From evidence to a word: findings against a run, then doubts, then what speaks for it."""

from __future__ import annotations

from dataclasses import replace

from collage_monitor.judgement.advice import advice_of
from collage_monitor.judgement.doubts import doubts, nothing_intended, witnesses
from collage_monitor.judgement.evidence import Evidence
from collage_monitor.judgement.judged_run import Case
from collage_monitor.judgement.rules import findings_against
from collage_monitor.judgement.words import GRAVITY, Finding, Judgement, judgement_of

__all__ = ["judge"]


def judge(evidence: Evidence) -> Judgement:
    """The judgement of the evidence; the same evidence gives the same words everywhere.

    One finding against the run is enough for a bad verdict; the gravest comes first. Without one, a doubt makes it
    "unknown"; only a run with neither is "healthy". Weights kept in a way that is not understood make it "unknown",
    whatever the numbers.
    """
    case = Case(evidence)
    unexplained = case.fingerprint.unexplained if case.fingerprint else None
    if unexplained:
        return judgement_of(case, [Finding("unknown", unexplained, "unexplained", None)])
    against = sorted(findings_against(case), key=lambda finding: GRAVITY.index(finding.health))
    if against:
        return replace(judgement_of(case, against), advice=advice_of(against, case.watch))
    if not case.active:
        return judgement_of(case, [nothing_intended(case)])
    return judgement_of(case, list(doubts(case)) or list(witnesses(case)))
