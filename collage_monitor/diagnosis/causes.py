"""The evidence around an incident, and the checks shared by problems: does a run's data support a named cause?

A check is a small function beside its alert that weighs one of the alert's `other_causes`. If a report is missing,
the check leaves the cause open and says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from collage_monitor import wire
from collage_monitor.diagnosis.evidence import finite
from collage_monitor.diagnosis.words import percent
from collage_monitor.onset import Onset
from collage_monitor.wire import Number

__all__ = [
    "Breach",
    "CauseVerdict",
    "Check",
    "IncidentEvidence",
    "Span",
    "left_open",
    "loaded_anew",
    "near_schedule_end",
    "restarted",
    "rose",
    "ruled_out",
    "supported",
    "text_of",
    "tokens_a_step",
]

_SCHEDULE_END: Final = 0.1
"""A schedule is at its end below this share of the run's largest learning rate."""
_CHANGED: Final = 0.1
"""Relative difference that counts as a change."""


@dataclass(frozen=True)
class CauseVerdict:
    """Whether a cause holds, None if the reports cannot tell; `because` is a clause with the reason."""

    holds: bool | None
    because: str


def supported(because: str) -> CauseVerdict:
    """The verdict that the reports support the cause."""
    return CauseVerdict(True, because)


def ruled_out(because: str) -> CauseVerdict:
    """The verdict that the reports rule the cause out."""
    return CauseVerdict(False, because)


def left_open(because: str) -> CauseVerdict:
    """The verdict that the reports cannot tell."""
    return CauseVerdict(None, because)


@dataclass(frozen=True)
class Span:
    """Steps of a run merged into one point.

    values: merged metrics and mean logged scalars, by key. lowest, highest: extremes over the single steps.
    attempt: the newest that had begun. ranks: how many of `world_size` reported.
    """

    first_step: int
    last_step: int
    values: Mapping[str, Number | None] = field(default_factory=dict)
    lowest: Mapping[str, Number | None] = field(default_factory=dict)
    highest: Mapping[str, Number | None] = field(default_factory=dict)
    attempt: int | None = None
    ranks: int | None = None
    world_size: int | None = None

    def number(self, key: str) -> float | None:
        """The value; None if it is undefined, not finite or not reported."""
        return finite(self.values.get(key))


@dataclass(frozen=True)
class Breach:
    """The consecutive steps at which an alert's condition held.

    before: the metric's value just before, None if not measured. value: its extreme as the breach began. lasts: the
    condition still held when the alert fired. from_start: it held from the first measured step on.
    """

    first_step: int
    last_step: int
    before: float | None
    value: float | None
    lasts: bool
    from_start: bool


@dataclass(frozen=True)
class IncidentEvidence:
    """A run's reports around an incident.

    run: None if it is deleted, or the alert is about the server. step: the run's when the alert fired. metric: the
    one that the alert judges; series: its values up to `step`. onset: when the metric changed. breach: without an
    onset, the steps at which the condition held. resumed_at: the resume that brought the change, or the newest one.
    before, after: the steps on both sides of the change, breach or resume. highest: largest logged values of the
    run; rising: whether they still grow at `step`. layers: metrics by layer after the change; types: of modules.
    events: of the run around the alert, oldest first; older_events, later_events: how many are left out.
    """

    incident: wire.Incident
    run: wire.Run | None = None
    step: int | None = None
    metric: str | None = None
    series: wire.Series | None = None
    onset: Onset | None = None
    breach: Breach | None = None
    resumed_at: int | None = None
    before: Span | None = None
    after: Span | None = None
    highest: Mapping[str, float] = field(default_factory=dict)
    rising: Mapping[str, bool] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Number | None]] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[wire.Event] = ()
    older_events: int = 0
    later_events: int = 0

    @property
    def watch(self) -> wire.WatchInfo | None:
        """The agent's description of the watch."""
        return self.run.watch if self.run else None

    def both(self, key: str) -> tuple[float, float] | None:
        """The value before and after; None unless both are known."""
        if self.before is None or self.after is None:
            return None
        before, after = self.before.number(key), self.after.number(key)
        return None if before is None or after is None else (before, after)

    def now(self, key: str) -> float | None:
        """The value after the change."""
        return self.after.number(key) if self.after else None


Check = Callable[[IncidentEvidence], CauseVerdict]


def text_of(value: float) -> str:
    """A number as a clause quotes it."""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"


def rose(evidence: IncidentEvidence, key: str, *, by: float = _CHANGED) -> CauseVerdict:
    """Whether a value grew by more than this share."""
    both = evidence.both(key)
    if both is None:
        return left_open(f"{key} was not reported on both sides")
    clause = f"{key} was {text_of(both[0])} before and {text_of(both[1])} after"
    return supported(clause) if both[1] > both[0] + by * abs(both[0]) else ruled_out(clause)


def restarted(evidence: IncidentEvidence) -> wire.Attempt | None:
    """The newest restart between the first step of `before` and the step at which the alert fired.

    An attempt that only logs, such as a later evaluation, restarts nothing.
    """
    if evidence.run is None or evidence.before is None:
        return None
    first, last = evidence.before.first_step, evidence.step
    begun = [
        attempt
        for attempt in evidence.run.attempts
        if attempt.attempt > 1
        and attempt.measured_from is not None
        and first < attempt.measured_from
        and (last is None or attempt.measured_from <= last)
    ]
    return max(begun, key=lambda attempt: attempt.attempt, default=None)


def loaded_anew(evidence: IncidentEvidence) -> CauseVerdict:
    """Whether the training was loaded again at these steps."""
    if evidence.before is None:
        return left_open("no step is known")
    attempt = restarted(evidence)
    if attempt is None:
        return ruled_out("no attempt began at these steps")
    began = f"attempt {attempt.attempt} began at step {attempt.first_step:,}"
    return left_open(f"{began}; whether that was a restart on purpose was not reported")


def near_schedule_end(evidence: IncidentEvidence) -> CauseVerdict:
    """Whether the learning rate is near 0 compared with the run's largest."""
    rate, highest = evidence.now("learning_rate"), evidence.highest.get("learning_rate")
    if rate is None or not highest:
        return left_open("learning_rate was not logged")
    clause = f"learning_rate is {text_of(rate)}, {percent(rate / highest)} of the run's largest"
    return supported(clause) if rate < _SCHEDULE_END * highest else ruled_out(clause)


def tokens_a_step(evidence: IncidentEvidence) -> tuple[float, float] | None:
    """Tokens per step before and after, from the growth of the logged count."""
    found = [_growth(span, "tokens") for span in (evidence.before, evidence.after)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _growth(span: Span | None, key: str) -> float | None:
    if span is None or span.last_step <= span.first_step:
        return None
    low, high = finite(span.lowest.get(key)), finite(span.highest.get(key))
    return None if low is None or high is None else (high - low) / (span.last_step - span.first_step)
