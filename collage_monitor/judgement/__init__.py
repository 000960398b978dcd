"""The judgement of a run in words, the same in terminal, notebook, dashboard and alert.

A good word needs evidence from every side: the updates arrive, no layer stands still, and a second witness (the
states' decrements or the oracle) agrees, because EDQ alone cannot see an error that already sits in the optimizer's
state. One number out of its bounds is enough for a bad verdict. If the evidence is too weak, the verdict is
"unknown". `docs/reference/verdict.md` states the rules; each is a function of `rules` or of `doubts`.

A process that holds a run's totals calls `evidence_of`; one that reads over HTTP uses
`collage_monitor.run_evidence`. Both give `judge` the same evidence, so the verdict is the same.
"""

from collage_monitor.judgement.advice import Lacking, advice_for, most_exact
from collage_monitor.judgement.evidence import (
    OF_LAYERS,
    RECENT_SHARE,
    RECENT_STEPS,
    Evidence,
    SilentRanks,
    Values,
    evidence_of,
    finite,
    labelled,
    last_change,
    longest_window,
    recent_points,
    silent_ranks,
    state_decrements,
)
from collage_monitor.judgement.judge import judge
from collage_monitor.judgement.judged_run import EDQ_TOLERANCE, LOST_TOLERANCE, loses_most
from collage_monitor.judgement.rules import STATE_TOLERANCE, average_findings
from collage_monitor.judgement.words import (
    CAVEATS,
    GRAVITY,
    NO_PROBLEM,
    WORDS_VERSION,
    Advice,
    Choice,
    Finding,
    Health,
    Judgement,
    percent,
    silence,
)

__all__ = [
    "Advice",
    "CAVEATS",
    "Choice",
    "EDQ_TOLERANCE",
    "Evidence",
    "Finding",
    "GRAVITY",
    "Health",
    "Judgement",
    "LOST_TOLERANCE",
    "Lacking",
    "NO_PROBLEM",
    "OF_LAYERS",
    "RECENT_SHARE",
    "RECENT_STEPS",
    "STATE_TOLERANCE",
    "SilentRanks",
    "Values",
    "WORDS_VERSION",
    "advice_for",
    "average_findings",
    "evidence_of",
    "finite",
    "judge",
    "labelled",
    "last_change",
    "longest_window",
    "loses_most",
    "most_exact",
    "percent",
    "recent_points",
    "silence",
    "silent_ranks",
    "state_decrements",
]
