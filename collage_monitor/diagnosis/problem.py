"""A problem is written once: its rule with its bounds and words, other causes, what to do first, and its alert.

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
    """Beyond `threshold` a metric counts against a run; beyond `alert_threshold` it also fires the alert.

    side: "<" if small values are bad. alert_threshold: None if every finding fires it. to_nearest: the metric says
    nothing about weights that are rounded at random.
    """

    metric: str
    side: Literal["<", ">"]
    threshold: float
    alert_threshold: float | None = None
    to_nearest: bool = False

    def fires_alert(self, value: float) -> bool:
        """Whether a value that counts against a run fires the alert, too."""
        if self.alert_threshold is None:
            return True
        return value < self.alert_threshold if self.side == "<" else value > self.alert_threshold

    def alert_condition(self) -> Condition:
        """The alert's condition on the metric itself, to be drawn into a curve of it."""
        labels: tuple[Label, ...] = (("strategy", "!~", _STOCHASTIC),) if self.to_nearest else ()
        threshold = self.threshold if self.alert_threshold is None else self.alert_threshold
        return Condition(f"collage_{self.metric}", self.side, threshold, labels=labels)


@dataclass(frozen=True)
class Problem:
    """One way in which a run can be wrong.

    rule: finds it in the evidence. bounds: one for each metric that its findings name. alert: fires while a finding
    is beyond its bound's `alert_threshold`. needs_updates: only runs whose intended updates are measured have it.
    """

    rule: Rule
    bounds: tuple[Bound, ...]
    alert: Alert | None = None
    needs_updates: bool = True

    @classmethod
    def with_alert(cls, name: str, rule: Rule, *bounds: Bound, needs_updates: bool = True, **texts: Any) -> Problem:
        """Make a problem with an alert; `texts`: further arguments of `about_runs`."""
        stands = Condition(_GAUGE, measure="stands", labels=(("alert", "=", name),))
        entry = about_runs(name, stands, **texts)
        drawn = tuple(bound.alert_condition() for bound in bounds if math.isfinite(bound.alert_threshold or 0.0))
        return cls(rule, bounds, replace(entry, drawn=drawn), needs_updates)

    def findings(self, case: Case) -> Iterator[Finding]:
        """Find what counts against the run; each finding says which alert it fires and since when it holds."""
        if self.needs_updates and not case.active:
            return
        for finding in self.rule(case):
            about = (finding.key, split_key(finding.key)[0])
            own = [bound for bound in self.bounds if bound.metric in about]
            fires = any(bound.fires_alert(finding.value or 0.0) for bound in own)
            yield msgspec.structs.replace(
                finding,
                alert=self.alert.name if self.alert is not None and fires else "",
                **_since(case, finding, own),
            )


def _since(case: Case, finding: Finding, bounds: list[Bound]) -> dict[str, Any]:
    for bound in bounds:
        found = case.evidence.history.since(finding.key, finding.layer, bound.threshold, below=bound.side == "<")
        if found is not None:
            return {"since": found[0], "since_words": found[1]}
    return {}
