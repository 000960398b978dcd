"""The diagnosis of a run: what is wrong, in words, the same in terminal, notebook, dashboard, report and alert.

A problem is written once (`problem.py`): its rule with bounds and words, other causes, what to do first, and the
alert that it is. A good word needs evidence from every side: the updates arrive, no layer stands still, and a
second witness (the states' decrements or the oracle) agrees, because EDQ alone cannot see an error that already
sits in the optimizer's state. One number out of its bounds is enough for a bad verdict. If the evidence is too
weak, the verdict is "unknown". `docs/reference/verdict.md` states the rules.

A training and a server call `evidence_of` on the totals they hold, then `judge`; others read what the server
judged."""

from collage_monitor.diagnosis.advice import Lacking, advice_for, most_exact
from collage_monitor.diagnosis.case import EDQ_TOLERANCE, LAYER_LOST, LOST_TOLERANCE, Case
from collage_monitor.diagnosis.evidence import (
    NOW_STEPS,
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
    state_ratios,
    tracked_metrics,
)
from collage_monitor.diagnosis.judge import PROBLEMS, judge
from collage_monitor.diagnosis.since import History, Track, since_beyond
from collage_monitor.diagnosis.states import STATE_TOLERANCE, state_in_words
from collage_monitor.diagnosis.weights import average_findings
from collage_monitor.diagnosis.words import (
    CAVEATS,
    GRAVITY,
    NO_PROBLEM,
    WORDS_VERSION,
    Health,
    gravity,
    oracle_reach,
    percent,
)

__all__ = [
    "CAVEATS",
    "Case",
    "EDQ_TOLERANCE",
    "Evidence",
    "GRAVITY",
    "Health",
    "History",
    "LAYER_LOST",
    "LOST_TOLERANCE",
    "Lacking",
    "NOW_STEPS",
    "NO_PROBLEM",
    "OF_LAYERS",
    "PROBLEMS",
    "RECENT_SHARE",
    "RECENT_STEPS",
    "STATE_TOLERANCE",
    "SilentRanks",
    "Track",
    "Values",
    "WORDS_VERSION",
    "advice_for",
    "average_findings",
    "evidence_of",
    "finite",
    "gravity",
    "judge",
    "labelled",
    "last_change",
    "longest_window",
    "most_exact",
    "oracle_reach",
    "percent",
    "recent_points",
    "silent_ranks",
    "since_beyond",
    "state_in_words",
    "state_ratios",
    "tracked_metrics",
]
