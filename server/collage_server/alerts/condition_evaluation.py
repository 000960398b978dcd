"""The catalogue's conditions evaluated outside Prometheus, on the same samples and with the same outcome.

It follows what Prometheus does with a rule: a condition that holds is pending until it has held for `for_seconds`
without a break, then fires, and goes on for `keep_firing_seconds` after it last held. A sample that is missing ends
its series. Ranges include both ends; a quantile lies linearly between its neighbours.

Two differences: a run's series continue when it is renamed or resumes under another strategy, and growth before the
first observed moment does not count.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from collage_monitor.diagnosis.alert import RECORDED, Alert, Condition

__all__ = ["AlertChange", "Evaluation", "Labels", "Sample", "identity_labels", "quantile"]

Labels = tuple[tuple[str, str], ...]
"""A series' labels, sorted by name."""
_LOOK_BACK_SECONDS: Final = 300.0
"""How far back Prometheus looks for the newest sample at an offset."""
_TO_DEVIATION: Final = 1.349
_ON: Final = "run_id"
_STEP: Final = "collage_step"
_STEPS: Final = (_STEP, "collage_steps_since_resume")
_INTENDED: Final = "collage_intended_share"
_STRATEGY: Final = "strategy"
_NAMES: Final = frozenset({"project", "run", _STRATEGY})
"""Labels that may change while it is the same run."""
_ALERT: Final = "alert"
_OF_A_FAULT: Final = _NAMES | {"key", "layer"}
"""Labels of a finding that may change while it is the same alert: a run has one finding of each."""


class Sample(NamedTuple):
    """The value of one series at the moment of an evaluation."""

    name: str
    labels: Labels
    value: float


@dataclass(frozen=True)
class AlertChange:
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
    labels: Labels
    """The newest ones."""
    since: float
    value: float
    firing: bool = False
    kept_since: float | None = None
    """When the condition stopped holding, while the alert is kept firing."""


@dataclass
class _Series:
    """Samples of the last hours, oldest first, as (time, value, True); (time, NaN, False) where it had ended."""

    labels: Labels
    """The newest ones."""
    run_id: str
    """Empty where it is no run's."""
    known: float
    """What it was at the first moment of all; 0 if it began later."""
    held: deque[tuple[float, float, bool]] = field(default_factory=deque)

    def newest(self, at: float) -> float | None:
        """The newest value at a moment; None where the series had ended or not begun."""
        for time, value, there in reversed(self.held):
            if time <= at:
                return value if there and time > at - _LOOK_BACK_SECONDS else None
        return None

    def since(self, begin: float) -> list[float]:
        """The values from then on, oldest first."""
        return [value for time, value, there in self.held if there and time >= begin]


class _History:
    """The requested series, by name and by their distinguishing labels."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, _Series]] = defaultdict(dict)
        self._keys: dict[Labels, Labels] = {}
        """What tells the newest samples' series apart, by their labels: most are the same at the next moment."""
        self._begun = False
        self.now = 0.0

    def add(self, now: float, samples: Iterable[Sample], longest_seconds: Mapping[str, float]) -> None:
        """Add the samples of one moment to the requested series; others are left out."""
        self.now = now
        keys: dict[Labels, Labels] = {}
        for name, labels, value in samples:
            if name not in longest_seconds:
                continue
            key = keys.get(labels)
            if key is None:
                key = keys[labels] = self._keys.get(labels) or identity_labels(labels)
            series = self._series[name].get(key)
            if series is None:
                run_id = next((own for label, own in key if label == _ON), "")
                series = self._series[name][key] = _Series(labels, run_id, 0.0 if self._begun else value)
            series.labels = labels
            series.held.append((now, value, True))
        self._keys = keys
        self._begun = True
        for name, by_key in self._series.items():
            kept_from = now - longest_seconds[name] - _LOOK_BACK_SECONDS
            for key in list(by_key):
                held = by_key[key].held
                if held[-1][0] < now and held[-1][2]:
                    held.append((now, math.nan, False))
                while held and held[0][0] < kept_from:
                    held.popleft()
                if not held:
                    del by_key[key]

    def series(self, name: str) -> Mapping[Labels, _Series]:
        """The series of that name with a sample in the look-back, ended or not."""
        return self._series.get(name, {})


class Evaluation:
    """Evaluates conditions of some alerts on samples whose times ascend.

    time_scale: shortens windows and waits alike, for a test in seconds.
    """

    def __init__(self, alerts: Iterable[Alert], time_scale: float = 1.0) -> None:
        self._alerts = [entry for entry in alerts if entry.conditions]
        self._scale = time_scale
        self._active: dict[tuple[str, Labels], _Active] = {}
        self._history = _History()
        self._longest: dict[str, float] = dict.fromkeys((*_STEPS, _INTENDED), 0.0)
        for entry in self._alerts:
            for condition in entry.conditions:
                for name in (condition.series, *RECORDED.get(condition.series, ())):
                    self._longest[name] = max(self._longest.get(name, 0.0), entry.window_seconds * time_scale)

    @property
    def series(self) -> frozenset[str]:
        """The names of all requested series; samples of others are left out."""
        return frozenset(self._longest)

    def observe(self, now: float, samples: Iterable[Sample]) -> list[AlertChange]:
        """Take in the samples of the moment `now` (Unix seconds); returns the alerts that began to fire, and those
        that ended."""
        given = list(samples)
        self._history.add(now, [*given, *_recorded(given)], self._longest)
        changes: list[AlertChange] = []
        for entry in self._alerts:
            changes += self._judge(entry, self._holding(entry))
        return changes

    def resume(self, alert: Alert, labels: Labels, since: float, value: float) -> None:
        """Take over an alert that fires already, from whoever evaluated before."""
        self._active[alert.name, identity_labels(labels)] = _Active(labels, since, value, firing=True)

    def _holding(self, alert: Alert) -> dict[Labels, tuple[Labels, float]]:
        """The series in which one of the alert's conditions holds now: their labels and value, by their
        distinguishing labels. For a run, only those of the first condition."""
        window = alert.window_seconds * self._scale
        held: dict[Labels, tuple[Labels, float]] = {}
        known: set[str] = set()
        for condition in alert.conditions:
            holding: set[str] = set()
            for key, series in self._history.series(condition.series).items():
                if series.run_id in known or not condition.matches(series.labels):
                    continue
                value = self._measure(condition, series, window)
                if value is not None and self._is_judged(alert, series.run_id):
                    holding.add(series.run_id)
                    held[key] = series.labels, value
            known |= holding
        return held

    def _is_judged(self, alert: Alert, run_id: str) -> bool:
        share = self._value_of_run(_INTENDED, run_id) if alert.least_intended_share else None
        if share is not None and share < alert.least_intended_share:
            return False
        if not alert.warm_up_steps and not alert.settle_steps:
            return True
        step, since_resume = (self._value_of_run(name, run_id) for name in _STEPS)
        if alert.warm_up_steps and (step is None or not step > alert.warm_up_steps):
            return False
        return not (alert.settle_steps and since_resume is not None and since_resume < alert.settle_steps)

    def _value_of_run(self, name: str, run_id: str) -> float | None:
        series = self._history.series(name).get(((_ON, run_id),))
        return None if series is None else series.newest(self._history.now)

    def _measure(self, condition: Condition, series: _Series, window: float) -> float | None:
        """The value that the rule would show if the condition holds; None if it does not."""
        now = self._history.now
        value = series.newest(now)
        if condition.measure == "recent":
            past = series.since(now - window)
            return _compared(condition, past[-1]) if past and self._is_present(series) else None
        if value is None:
            return None
        if condition.measure == "value":
            return _compared(condition, value)
        if condition.measure == "stands":
            return value
        if condition.measure == "age":
            return _compared(condition, now - value)
        if condition.measure == "not finite":
            return None if math.isfinite(value) else math.nan
        if condition.measure == "growth":
            before = series.newest(now - window)
            return _compared(condition, value - (series.known if before is None else before))
        past = series.since(now - window)
        if condition.measure == "deviations":
            low, middle, high = (quantile(past, share) for share in (0.25, 0.5, 0.75))
            spread = (high - low) / _TO_DEVIATION + 0.01 * abs(middle)
            return _compared(condition, _divided(value - middle, spread))
        # Most are far from it, and sorting an hour of each series took a quarter of a round.
        nearest = (max if condition.comparison == "<" else min)(past, default=math.nan)
        if not math.isnan(nearest) and not _holds(condition, value, condition.threshold * nearest):
            return None
        usual = quantile(past, condition.quantile)
        if condition.quantile_from is not None and not usual >= condition.quantile_from:
            return None
        return value if _holds(condition, value, condition.threshold * usual) else None

    def _is_present(self, series: _Series) -> bool:
        """Whether the series' run goes on, under the strategy of its newest value."""
        steps = self._history.series(_STEP).get(((_ON, series.run_id),))
        if steps is None or steps.newest(self._history.now) is None:
            return False
        return dict(steps.labels).get(_STRATEGY) == dict(series.labels).get(_STRATEGY)

    def _judge(self, alert: Alert, holding: Mapping[Labels, tuple[Labels, float]]) -> list[AlertChange]:
        now = self._history.now
        changes = []
        for key, (labels, value) in holding.items():
            active = self._active.setdefault((alert.name, key), _Active(labels, now, value))
            active.labels, active.value, active.kept_since = labels, value, None
            if not active.firing and now - active.since >= alert.for_seconds * self._scale:
                active.firing = True
                changes.append(AlertChange(alert, labels, True, value, active.since))
        for (name, key), active in list(self._active.items()):
            if name != alert.name or key in holding:
                continue
            if not active.firing:
                del self._active[name, key]
            elif self._has_ended(alert, active):
                del self._active[name, key]
                changes.append(AlertChange(alert, active.labels, False, active.value, active.since))
        return changes

    def _has_ended(self, alert: Alert, active: _Active) -> bool:
        """Whether the alert was kept firing for long enough, from the first moment without its condition."""
        now = self._history.now
        if active.kept_since is None:
            active.kept_since = now
        return now - active.kept_since >= alert.keep_firing_seconds * self._scale


def identity_labels(labels: Labels) -> Labels:
    """What tells a series from every other: of a run's all labels but those that may change."""
    named = {name for name, _ in labels}
    changing = _OF_A_FAULT if _ALERT in named else _NAMES if _ON in named else frozenset[str]()
    return tuple((name, value) for name, value in labels if name not in changing)


def quantile(values: list[float], share: float) -> float:
    """Prometheus's: NaN is less than any number; NaN of no values."""
    if not values:
        return math.nan
    numbers = [value for value in values if value == value]
    ordered = [math.nan] * (len(values) - len(numbers)) + sorted(numbers)
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (rank - low)) + ordered[high] * (rank - low)


def _recorded(samples: Iterable[Sample]) -> list[Sample]:
    by_name: dict[str, dict[Labels, Sample]] = {name: {} for sources in RECORDED.values() for name in sources}
    for sample in samples:
        if sample.name in by_name:
            by_name[sample.name][sample.labels] = sample
    found: list[Sample] = []
    for name, sources in RECORDED.items():
        first: dict[Labels, float] = {}
        for source in sources:
            for labels, sample in by_name[source].items():
                first.setdefault(labels, sample.value)
        found += [Sample(name, labels, value) for labels, value in first.items()]
    return found


def _holds(condition: Condition, value: float, threshold: float) -> bool:
    return value < threshold if condition.comparison == "<" else value > threshold


def _compared(condition: Condition, value: float) -> float | None:
    return value if _holds(condition, value, condition.threshold) else None


def _divided(over: float, under: float) -> float:
    if under:
        return over / under
    return math.nan if not over else math.copysign(math.inf, over)
