"""A problem is written once: its rule with its bounds and words, other causes, what to do first, and what it wakes.

Modules beside this one hold the problems: `updates.py`, `states.py`, `residuals.py`, `weights.py`. Terminal,
notebook, pages, report, alerts, Prometheus rules and runbook read them; none has a bound or a sentence of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec

from collage_monitor.diagnosis.alert import Alert, Condition, Label, about_runs
from collage_monitor.diagnosis.case import Case
from collage_monitor.metrics import split_key
from collage_monitor.strategies import STRATEGIES
from collage_monitor.wire import Finding

__all__ = ["Bound", "Problem", "Rule"]

Rule = Callable[[Case], Iterator[Finding]]
_GAUGE: Final = "collage_finding"
_STOCHASTIC: Final = "|".join(name for name, entry in STRATEGIES.items() if entry.stochastic)


@dataclass(frozen=True)
class Bound:
    """From where on a metric is held against a run, and from where on that wakes somebody; None: from there on.

    to_nearest: of weights that are rounded at random it says nothing.
    """

    metric: str
    side: Literal["<", ">"]
    held: float
    wakes: float | None = None
    to_nearest: bool = False

    def is_awaking(self, value: float) -> bool:
        """Whether a value that is held against a run wakes somebody."""
        if self.wakes is None:
            return True
        return value < self.wakes if self.side == "<" else value > self.wakes

    def drawn(self) -> Condition:
        """What wakes somebody, as a condition on the metric itself, for a curve of it."""
        labels: tuple[Label, ...] = (("strategy", "!~", _STOCHASTIC),) if self.to_nearest else ()
        threshold = self.held if self.wakes is None else self.wakes
        return Condition(f"collage_{self.metric}", self.side, threshold, labels=labels)


@dataclass(frozen=True)
class Problem:
    """What can be wrong with a run.

    rule: finds it in the evidence. bounds: of the metrics that its findings name. alert: wakes somebody while one
    of its findings stands beyond the bound that wakes; it has no condition of its own. needs_updates: it is none of
    a run without an intended update."""

    rule: Rule
    bounds: tuple[Bound, ...]
    alert: Alert | None = None
    needs_updates: bool = True

    @classmethod
    def with_alert(cls, name: str, rule: Rule, *bounds: Bound, needs_updates: bool = True, **texts: Any) -> Problem:
        """A problem that wakes somebody; `texts`: of `about_runs`."""
        stands = Condition(_GAUGE, measure="stands", labels=(("alert", "=", name),))
        entry = about_runs(name, stands, **texts)
        drawn = tuple(bound.drawn() for bound in bounds if bound.wakes is None or math.isfinite(bound.wakes))
        return cls(rule, bounds, replace(entry, drawn=drawn), needs_updates)

    def findings(self, case: Case) -> Iterator[Finding]:
        """What speaks against the run, with the alert that it is and since when."""
        if self.needs_updates and not case.active:
            return
        for finding in self.rule(case):
            about = (finding.key, split_key(finding.key)[0])
            own = [bound for bound in self.bounds if bound.metric in about]
            wakes = self.alert is not None and any(bound.is_awaking(finding.value or 0.0) for bound in own)
            yield msgspec.structs.replace(
                finding,
                alert=self.alert.name if self.alert is not None and wakes else "",
                **_since(case, finding, own),
            )


def _since(case: Case, finding: Finding, bounds: list[Bound]) -> dict[str, Any]:
    for bound in bounds:
        found = case.evidence.history.since(finding.key, finding.layer, bound.held, below=bound.side == "<")
        if found is not None:
            return {"since": found[0], "since_words": found[1]}
    return {}
