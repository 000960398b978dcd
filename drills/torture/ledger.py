"""What was sent and acknowledged, and how a point must look: three ranks whose totals tell who is in a sum.

Rank r weighs 1 + r, so that the ratio and the number of ranks of a point name the ranks that it holds. Evaluators
log to the run beside them, one the odd steps and one the even ones, back and forth.
"""

from __future__ import annotations

import itertools
from threading import Lock

from collage_monitor import wire
from tests.server.samples import report

__all__ = ["EVALUATED", "EVALUATORS", "RANKS", "Ledger", "evaluated", "members", "report_of"]

RANKS = 3
EVALUATORS = 2
EVALUATED = "evaluator/accuracy"
_BACK_AND_FORTH = 15
"""Of so many steps, and one, an evaluator logs the last one first."""
_SETS = [frozenset(c) for size in range(1, RANKS + 1) for c in itertools.combinations(range(RANKS), size)]
_BY_WEIGHT = {(len(ranks), sum(1 + rank for rank in ranks)): ranks for ranks in _SETS}


def report_of(rank, step):
    """The report of a rank at a step; its number within the stream is step − 1."""
    return report(step - 1, step, rank=rank)


def evaluated(place, seq):
    """An evaluator's report: no step is logged twice, by either of them."""
    step = 1 + place + EVALUATORS * (seq ^ _BACK_AND_FORTH)
    return wire.Report(seq=seq, step=step, time=1000.0 + seq, scalars={EVALUATED: step / 7})


def members(ratio, ranks):
    """Which ranks a point with this lost_update_ratio and number of ranks holds; None: no whole reports make it."""
    weight = 6.0 * ratio * ranks
    return _BY_WEIGHT.get((ranks, round(weight))) if abs(weight - round(weight)) < 1e-9 else None


class Ledger:
    """Steps by rank in groups that were sent as one batch; what was acknowledged. Thread-safe."""

    def __init__(self):
        self.groups: list[list[range]] = [[] for _ in range(RANKS)]
        self.acknowledged = [0] * RANKS
        self.evaluated = [0] * EVALUATORS
        """Reports of each evaluator that were acknowledged."""
        self.findings: list[str] = []
        self.waits: list[float] = []
        """Seconds from sending a batch to its answer, of those that were answered."""
        self._lock = Lock()

    def next_group(self, rank, size):
        """The steps of the rank's next batch."""
        with self._lock:
            first = self.groups[rank][-1].stop if self.groups[rank] else 1
            group = range(first, first + size)
            self.groups[rank].append(group)
            return group

    def acknowledge(self, rank, group):
        """The answer has come: the next batch goes only now."""
        with self._lock:
            self.acknowledged[rank] = group.stop - 1

    def find(self, text):
        """Something that must not be."""
        with self._lock:
            if len(self.findings) < 20:
                self.findings.append(text)

    def snapshot(self):
        """(last acknowledged step by rank, groups by rank)."""
        with self._lock:
            return list(self.acknowledged), [list(groups) for groups in self.groups]

    @property
    def total(self):
        """Reports acknowledged."""
        return sum(self.acknowledged)
