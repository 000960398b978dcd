"""The definition of an alert: a condition on gauges of `/metrics`, when it is judged, and what to do about it.

A `Condition` is written as PromQL for Prometheus, and evaluated by the server itself: one text, two
readers that agree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from string import Template
from typing import Any, Final, Literal

from collage_monitor.diagnosis.causes import CauseVerdict, Check, IncidentEvidence, left_open
from collage_monitor.metrics import METRICS, SCALARS

__all__ = [
    "Alert",
    "Condition",
    "Label",
    "Measure",
    "RECORDED",
    "Severity",
    "about_runs",
    "about_the_server",
    "duration",
]

Severity = Literal["info", "warning", "critical"]
Measure = Literal["value", "stands", "recent", "share of quantile", "deviations", "growth", "age", "not finite"]
Label = tuple[str, Literal["=", "=~", "!~"], str]

RECORDED: Final = {"collage:grad_norm": ("collage_grad_norm_unclipped", "collage_grad_norm")}
"""Series that the rules record: the first of these gauges that a run has."""
_LABELS: Final = {"state": "state", "steps": "window"}
"""What a gauge calls the label of a metric."""
_SETTLE_STEPS: Final = 100


@dataclass(frozen=True)
class Condition:
    """Holds for each series called `series` whose `measure` compares with `threshold`.

    "value": x, the newest value. "stands": x is there, whatever it is, of any layer. "recent": the newest value
    within the window, whatever its age, if the run is still under the same strategy. "share of quantile": x divided
    by the series' own `quantile` within the window, if that quantile is at least `quantile_from`: a share of a
    value near 0 is noise. "deviations": (x − median) over the robust standard deviation IQR / 1.349 of the window,
    plus a hundredth of |median|, so that a series without noise does not alarm at the first change. "growth": x
    minus its value a window ago, or minus 0 if it had none. "age": seconds since the time x. "not finite": x is NaN
    or infinite; there is no threshold."""

    series: str
    comparison: Literal["<", ">"] = ">"
    threshold: float = 0.0
    measure: Measure = "value"
    labels: tuple[Label, ...] = ()
    quantile: float = 0.5
    quantile_from: float | None = None

    def is_beyond(self, value: float) -> bool | None:
        """Whether a single value is beyond the threshold; None where the measure needs the values around it."""
        if self.measure == "not finite":
            return not math.isfinite(value)
        if self.measure not in {"value", "recent"}:
            return None
        return value < self.threshold if self.comparison == "<" else value > self.threshold

    def matches(self, labels: Iterable[tuple[str, str]]) -> bool:
        """Whether it is about the series with these labels."""
        own = dict(labels) if self.labels else {}
        for name, operator, wanted in self.labels:
            value = own.get(name, "")
            same = value == wanted if operator == "=" else re.fullmatch(wanted, value) is not None
            if same is (operator == "!~"):
                return False
        return True

    def promql(self) -> str:
        """The condition as PromQL, `$window` in place of the window."""
        chosen = ", ".join(f'{name}{operator}"{value}"' for name, operator, value in self.labels)
        series = self.series + (f"{{{chosen}}}" if chosen else "")
        window = f"{series}[$window]"
        against = f"{self.comparison} {self.threshold:g}"
        median = f"quantile_over_time(0.5, {window})"
        past = f"quantile_over_time({self.quantile:g}, {window})"
        if self.quantile_from is not None:
            past = f"({past} >= {self.quantile_from:g})"
        spread = f"(quantile_over_time(0.75, {window}) - quantile_over_time(0.25, {window})) / 1.349"
        deviation = f"({spread} + 0.01 * abs({median}))"
        begun = f"({series} unless {series} offset $window)"
        return {
            "value": f"{series} {against}",
            "stands": f"max without(layer) ({series})",
            "recent": f"last_over_time({window}) {against} and on(run_id, strategy) collage_step",
            "share of quantile": f"{series} {against} * {past}",
            "deviations": f"({series} - {median}) / {deviation} {against}",
            "growth": f"({series} - {series} offset $window {against} or {begun} {against})",
            "age": f"time() - {series} {against}",
            "not finite": f"{series} - {series} != 0",
        }[self.measure]


@dataclass(frozen=True)
class Alert:
    """A condition on a run, and what to do about it.

    `expression` must hold for `for_seconds` without a break; the alert goes on for `keep_firing_seconds` after it
    last held, so that it does not flap. `other_causes` are harmless or foreign explanations to rule out;
    `checks[i]` weighs `other_causes[i]`. `first_step` says what to look at or do first. `conditions`: the parts of
    `expression`, one of which must hold. Only the first that holds for a run fires, so that one fault is one
    incident. The server evaluates these; an alert without any is left to Prometheus. A run is not judged in its
    first `warm_up_steps` nor in `settle_steps` after a resume. `on_by_default`: enabled whatever severity is asked
    for. `scope` "server": it is about the server, not a run. While the norm of the newest intended update is below
    `least_intended_share` of that usual in its last fifth, as at the end of a schedule to zero, a run is not
    judged: what is lost of it is nothing. `drawn`: where on the curve of a metric it begins; of an alert on gauges
    its conditions.
    """

    name: str
    expression: str
    window_seconds: float
    for_seconds: float
    warm_up_steps: int
    severity: Severity
    summary: str
    meaning: str
    other_causes: tuple[str, ...]
    first_step: str
    conditions: tuple[Condition, ...] = ()
    drawn: tuple[Condition, ...] = ()
    checks: tuple[Check, ...] = ()
    keep_firing_seconds: float = 0.0
    settle_steps: int = 0
    least_intended_share: float = 0.0
    on_by_default: bool = False
    scope: Literal["run", "server"] = "run"

    def condition(self, time_scale: float = 1.0) -> str:
        """The PromQL expression. `time_scale` shortens its window, for a test or a rehearsal in seconds."""
        window = duration(self.window_seconds * time_scale)
        names = {"window": window, "warm_up": self.warm_up_steps, "settle": self.settle_steps}
        return Template(self.expression).substitute(names)

    def described(self) -> dict[str, Any]:
        """The entry as plain values; its checks are code and stay out."""
        return {
            entry.name: list(map(asdict, getattr(self, entry.name)))
            if entry.name in {"conditions", "drawn"}
            else getattr(self, entry.name)
            for entry in fields(self)
            if entry.name != "checks"
        }

    def metric(self, labels: Mapping[str, str]) -> str | None:
        """The metric or logged scalar that is judged, from the labels of the series that fired; None where it is
        neither."""
        for condition in self.conditions:
            name = condition.series.partition("collage")[2][1:]
            if name == "finding":
                return labels.get("key")
            name = name.removeprefix("worst_layer_")
            if name in METRICS:
                label = labels.get(_LABELS.get(METRICS[name].label or "", ""))
                return f"{name}/{label}" if label else name
            if name in SCALARS:
                return name
        return None

    def cause_verdicts(self, evidence: IncidentEvidence) -> list[tuple[str, CauseVerdict]]:
        """The verdict on each of the other causes."""
        checks = (*self.checks, *[_unchecked] * len(self.other_causes))
        return [(cause, check(evidence)) for cause, check in zip(self.other_causes, checks, strict=False)]


def about_runs(
    name: str,
    *conditions: Condition,
    window_seconds: float = 0.0,
    warm_up_steps: int = 500,
    settle_steps: int = _SETTLE_STEPS,
    keep_firing_seconds: float = 600.0,
    least_intended_share: float = 0.0,
    **texts: Any,
) -> Alert:
    """An alert on each run that is beyond its warm-up, has settled after a resume and still intends something."""
    guards = " and on(run_id) collage_step > $warm_up" if warm_up_steps else ""
    guards += " unless on(run_id) collage_steps_since_resume < $settle" if settle_steps else ""
    if least_intended_share:
        guards += f" unless on(run_id) collage_intended_share < {least_intended_share:g}"
    return Alert(
        name=name,
        expression=_one_of(conditions, guarded=bool(guards)) + guards,
        window_seconds=window_seconds,
        warm_up_steps=warm_up_steps,
        settle_steps=settle_steps,
        least_intended_share=least_intended_share,
        keep_firing_seconds=keep_firing_seconds,
        conditions=conditions,
        drawn=conditions,
        **texts,
    )


def about_the_server(name: str, condition: Condition, *, window_seconds: float = 0.0, **texts: Any) -> Alert:
    """An alert on the server itself."""
    return Alert(
        name=name,
        expression=condition.promql(),
        window_seconds=window_seconds,
        warm_up_steps=0,
        keep_firing_seconds=600.0,
        conditions=(condition,),
        scope="server",
        **texts,
    )


def _unchecked(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("no check of it is known")


def _one_of(conditions: tuple[Condition, ...], *, guarded: bool) -> str:
    text = " or on(run_id) ".join(condition.promql() for condition in conditions)
    return f"({text})" if guarded and len(conditions) > 1 else text


def duration(seconds: float) -> str:
    """Seconds as PromQL writes them, in the largest unit that gives a whole number: "1h", "90s", "1500ms"."""
    milliseconds = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % size == 0 and milliseconds:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"
