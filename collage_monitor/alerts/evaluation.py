"""The catalogue's conditions evaluated outside Prometheus, on the same samples and with the same outcome.

It follows what Prometheus does with a rule: a condition that holds is pending until it has held for `for_seconds`
without a break, then fires, and goes on for `keep_firing_seconds` after it last held. A sample that is missing ends
its series. Ranges include both ends; a quantile lies linearly between its neighbours.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from collage_monitor.alerts.definition import RECORDED, Alert, Condition

__all__ = ["Change", "Evaluation", "Labels", "Sample", "quantile"]

Labels = tuple[tuple[str, str], ...]
"""A series' labels, sorted by name."""
_LOOK_BACK_SECONDS: Final = 300.0
"""How far back Prometheus looks for the newest sample at an offset."""
_TO_DEVIATION: Final = 1.349
_ON: Final = "run_id"
_STEPS: Final = ("collage_step", "collage_steps_since_resume")


@dataclass(frozen=True)
class Sample:
    """The value of one series at the moment of an evaluation."""

    name: str
    labels: Labels
    value: float


@dataclass(frozen=True)
class Change:
    """An alert that began to fire or ended, for the series with these labels; `value` when its condition last held.

    since: when the condition began to hold, in Unix seconds.
    """

    alert: Alert
    labels: Labels
    firing: bool
    value: float
    since: float


@dataclass
class _Active:
    since: float
    value: float
    firing: bool = False
    kept_since: float | None = None
    """When the condition stopped holding, while the alert is kept firing."""


class _History:
    """Samples of the last hours by series; NaN marks that the series had ended."""

    def __init__(self) -> None:
        self._held: dict[str, dict[Labels, deque[tuple[float, float, bool]]]] = defaultdict(dict)
        self.now = 0.0

    def add(self, now: float, samples: Iterable[Sample], longest_seconds: Mapping[str, float]) -> None:
        """Add the samples of one moment to the series that anybody asks for; others are left out."""
        self.now = now
        for sample in samples:
            if sample.name in longest_seconds:
                held = self._held[sample.name].setdefault(sample.labels, deque())
                held.append((now, sample.value, True))
        for name, series in self._held.items():
            kept_from = now - longest_seconds[name] - _LOOK_BACK_SECONDS
            for labels in list(series):
                held = series[labels]
                if held[-1][0] < now and held[-1][2]:
                    held.append((now, math.nan, False))
                while held and held[0][0] < kept_from:
                    held.popleft()
                if not held:
                    del series[labels]

    def series(self, name: str) -> list[Labels]:
        """Labels of the series with a sample in the look-back, ended or not."""
        return list(self._held.get(name, ()))

    def newest(self, name: str, labels: Labels, at: float) -> float | None:
        """The newest value at a moment; None where the series had ended or not begun."""
        for time, value, there in reversed(self._held.get(name, {}).get(labels, ())):
            if time <= at:
                return value if there and time > at - _LOOK_BACK_SECONDS else None
        return None

    def within(self, name: str, labels: Labels, seconds: float) -> list[float]:
        """The values of the last `seconds`, oldest first."""
        held = self._held.get(name, {}).get(labels, ())
        return [value for time, value, there in held if there and time >= self.now - seconds]


class Evaluation:
    """Conditions of some alerts on samples that come at moments in ascending order.

    time_scale: shortens windows and waits alike, for a test in seconds.
    """

    def __init__(self, alerts: Iterable[Alert], time_scale: float = 1.0) -> None:
        self._alerts = [entry for entry in alerts if entry.conditions]
        self._scale = time_scale
        self._active: dict[tuple[str, Labels], _Active] = {}
        self._history = _History()
        self._longest: dict[str, float] = dict.fromkeys(_STEPS, 0.0)
        self._steps_of: dict[str, dict[str | None, Labels]] = {}
        for entry in self._alerts:
            for condition in entry.conditions:
                for name in (condition.series, *RECORDED.get(condition.series, ())):
                    self._longest[name] = max(self._longest.get(name, 0.0), entry.window_seconds * time_scale)

    def observe(self, now: float, samples: Iterable[Sample]) -> list[Change]:
        """Take in the samples of the moment `now` (Unix seconds); what began to fire, and what ended."""
        given = list(samples)
        self._history.add(now, [*given, *_recorded(given)], self._longest)
        # By run: looked for among all runs, for each of its series, they would take the square of their number.
        self._steps_of = {
            name: {dict(labels).get(_ON): labels for labels in reversed(self._history.series(name))}
            for name in _STEPS
        }
        changes: list[Change] = []
        for entry in self._alerts:
            changes += self._judge(entry, self._holding(entry))
        return changes

    def resume(self, alert: Alert, labels: Labels, since: float, value: float) -> None:
        """Take over an alert that fires already, from whoever evaluated before."""
        self._active[alert.name, labels] = _Active(since, value, firing=True)

    def _holding(self, alert: Alert) -> dict[Labels, float]:
        """The series in which one of the alert's conditions holds now, and their values: the first one of a run."""
        window = alert.window_seconds * self._scale
        held: dict[Labels, float] = {}
        for condition in alert.conditions:
            known = {dict(labels).get(_ON) for labels in held}
            for labels in self._history.series(condition.series):
                if not _matches(condition, labels) or dict(labels).get(_ON) in known:
                    continue
                if not self._is_judged(alert, labels):
                    continue
                value = self._measure(condition, labels, window)
                if value is not None:
                    held[labels] = value
        return held

    def _is_judged(self, alert: Alert, labels: Labels) -> bool:
        mine = dict(labels).get(_ON)
        steps = [self._value_of_run(name, mine) for name in _STEPS]
        if alert.warm_up_steps and (steps[0] is None or not steps[0] > alert.warm_up_steps):
            return False
        return not (alert.settle_steps and steps[1] is not None and steps[1] < alert.settle_steps)

    def _value_of_run(self, name: str, run_id: str | None) -> float | None:
        labels = self._steps_of[name].get(run_id)
        return None if labels is None else self._history.newest(name, labels, self._history.now)

    def _measure(self, condition: Condition, labels: Labels, window: float) -> float | None:
        """The value that the rule would show if the condition holds; None if it does not."""
        history, name = self._history, condition.series
        value = history.newest(name, labels, history.now)
        if condition.measure == "recent":
            past = history.within(name, labels, window)
            return _compared(condition, past[-1]) if past else None
        if value is None:
            return None
        if condition.measure == "value":
            return _compared(condition, value)
        if condition.measure == "distance":
            return _compared(condition, abs(value - 1))
        if condition.measure == "age":
            return _compared(condition, history.now - value)
        if condition.measure == "not finite":
            return None if math.isfinite(value) else math.nan
        if condition.measure == "growth":
            before = history.newest(name, labels, history.now - window)
            return _compared(condition, value - (before or 0.0))
        past = history.within(name, labels, window)
        if condition.measure == "deviations":
            low, middle, high = (quantile(past, share) for share in (0.25, 0.5, 0.75))
            spread = (high - low) / _TO_DEVIATION + 0.01 * abs(middle)
            return _compared(condition, _divided(value - middle, spread))
        usual = quantile(past, condition.quantile)
        if condition.quantile_from is not None and not usual >= condition.quantile_from:
            return None
        return value if _holds(condition, value, condition.threshold * usual) else None

    def _judge(self, alert: Alert, holding: Mapping[Labels, float]) -> list[Change]:
        now = self._history.now
        changes = []
        for labels, value in holding.items():
            active = self._active.setdefault((alert.name, labels), _Active(now, value))
            active.value, active.kept_since = value, None
            if not active.firing and now - active.since >= alert.for_seconds * self._scale:
                active.firing = True
                changes.append(Change(alert, labels, True, value, active.since))
        for (name, labels), active in list(self._active.items()):
            if name != alert.name or labels in holding:
                continue
            if not active.firing:
                del self._active[name, labels]
            elif self._has_ended(alert, active):
                del self._active[name, labels]
                changes.append(Change(alert, labels, False, active.value, active.since))
        return changes

    def _has_ended(self, alert: Alert, active: _Active) -> bool:
        """Whether the alert was kept firing for long enough, from the first moment without its condition."""
        now = self._history.now
        if active.kept_since is None:
            active.kept_since = now
        return now - active.kept_since >= alert.keep_firing_seconds * self._scale


def quantile(values: list[float], share: float) -> float:
    """Prometheus's: NaN is less than any number; NaN of no values."""
    if not values:
        return math.nan
    ordered = [value for value in values if math.isnan(value)]
    ordered += sorted(value for value in values if not math.isnan(value))
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (rank - low)) + ordered[high] * (rank - low)


def _recorded(samples: Iterable[Sample]) -> list[Sample]:
    by_name: dict[str, dict[Labels, Sample]] = defaultdict(dict)
    for sample in samples:
        by_name[sample.name][sample.labels] = sample
    found: list[Sample] = []
    for name, sources in RECORDED.items():
        first: dict[Labels, float] = {}
        for source in sources:
            for labels, sample in by_name[source].items():
                first.setdefault(labels, sample.value)
        found += [Sample(name, labels, value) for labels, value in first.items()]
    return found


def _matches(condition: Condition, labels: Labels) -> bool:
    own = dict(labels)
    for name, operator, wanted in condition.labels:
        value = own.get(name, "")
        same = value == wanted if operator == "=" else re.fullmatch(wanted, value) is not None
        if same is (operator == "!~"):
            return False
    return True


def _holds(condition: Condition, value: float, threshold: float) -> bool:
    return value < threshold if condition.comparison == "<" else value > threshold


def _compared(condition: Condition, value: float) -> float | None:
    return value if _holds(condition, value, condition.threshold) else None


def _divided(over: float, under: float) -> float:
    if under:
        return over / under
    return math.nan if not over else math.copysign(math.inf, over)
