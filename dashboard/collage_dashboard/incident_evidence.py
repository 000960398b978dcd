"""A run's reports around an incident, read over HTTP: when it changed, and the steps before and after.

with Client(server_url, token) as client:
    evidence = read_incident_evidence(client, client.incident(incident_id))
    for cause, verdict in alert(evidence.incident.alert).cause_verdicts(evidence): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from collage_monitor import wire
from collage_monitor.alerts import ALERTS, Alert, Condition
from collage_monitor.client import Client
from collage_monitor.diagnosis import EDQ_TOLERANCE, finite
from collage_monitor.diagnosis.causes import Breach, IncidentEvidence, Span
from collage_monitor.errors import NotFound
from collage_monitor.metrics import METRICS, STATE_RATIOS, split_key
from collage_monitor.onset import Onset
from collage_monitor.run_history import read_history
from collage_monitor.wire import Number, from_number

__all__ = ["COMPARED_METRICS", "STEPS_AFTER_ALERT", "read_before_after", "read_incident_evidence"]

COMPARED_METRICS: Final = (
    "learning_rate",
    "loss",
    "grad_norm",
    "grad_norm_unclipped",
    "clip_ratio",
    "param_norm",
    "intended_norm",
    "update_to_weight_ratio",
    "edq_ratio",
    "lost_update_ratio",
    "half_ulp_margin",
    *STATE_RATIOS,
    "edq_oracle_ratio",
    "oracle_steps",
    "residual_zero_ratio",
    "residual_dropped_ratio",
    "residual_fill_ratio",
    "nonfinite_params",
    "residual_nonfinite",
    "skipped_steps",
    "external_writes",
    "oracle_restarts",
    "tokens",
)
"""What is compared before and after, as far as the run reported it; a labelled metric under each of its labels.

tests/alerts/test_causes.py holds it to contain all that the checks beside alerts compare.
"""
_COUNTS: Final = frozenset({"skipped_steps", "external_writes", "oracle_restarts", "tokens"})
"""Logged counts since the run began: the newest says more than the mean."""
_OF_LAYERS: Final = ("edq_ratio", "update_to_weight_ratio")
_POINTS: Final = 400
_BESIDE: Final = 16
"""Points of the series on either side that are merged."""
_LOOK_BACK_SECONDS: Final = 3600.0
_FEWEST_POINTS: Final = 48
STEPS_AFTER_ALERT: Final = 32
"""Measured steps after the alert that are looked at, too: they place the change."""
_METRICS_A_QUESTION: Final = 20
_EVENTS_SINCE: Final = 100


def read_incident_evidence(client: Client, incident: wire.Incident) -> IncidentEvidence:
    """The evidence around an incident, from some ten questions.

    Raises:
        CollageError: the server does not answer, or refuses.
    """
    if incident.run_id is None:
        return IncidentEvidence(incident)
    try:
        run = client.run(incident.run_id)
        until = client.events(incident.run_id, newest=True, until=incident.started_at)
        since = client.events(incident.run_id, cursor=until.cursor, limit=_EVENTS_SINCE)
    except NotFound:
        return IncidentEvidence(incident)
    evidence = _Reader(client, incident, run).read([*until.events, *since.events])
    return replace(evidence, older_events=until.left_out, later_events=since.left_out)


def read_before_after(client: Client, run: wire.Run, steps: tuple[int, int]) -> tuple[Span | None, Span | None]:
    """What a run reported before steps that a reader picked, and from there on; None where nothing was.

    One step, (800, 800), gives the `_BESIDE` measured steps before it, and as many from it on. A range, (800, 900),
    gives its own steps, and as many before it.

    Raises:
        CollageError: the server does not answer, or refuses.
    """
    first, last = steps
    before: tuple[int, int] | None = (max(first - (last - first + 1), 0), max(first - 1, 0))
    after: tuple[int, int] | None = steps
    if first == last:
        before, after = _steps_beside(client, run, first)
    spans = [None if found is None else _read_span(client, run, *found) for found in (before, after)]
    before_it, after_it = (span if span is not None and span.values else None for span in spans)
    return before_it, after_it


def _steps_beside(
    client: Client, run: wire.Run, step: int
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The measured steps on either side of a step; merged ones where the server keeps no others."""
    key = next((name for name in ("edq_ratio", "loss") if name in run.latest or name in run.scalars), None)
    if key is None:
        return None, None
    reach = _POINTS // 2 * (run.watch.every if run.watch and run.watch.every else 1)
    sides: list[list[tuple[int, int]]] = []
    for first, last in ((max(step - reach, 0), step + reach), (None, None)):
        found = client.series(run.run_id, key, points=_POINTS, first_step=first, last_step=last)
        points = list(zip(found.first_steps, found.steps, strict=True))
        before = [point for point in points if point[1] < step][-_BESIDE:]
        sides = [before, [point for point in points if point[0] >= step][:_BESIDE]]
        if all(sides):
            break
    before_it, after_it = ((side[0][0], side[-1][1]) if side else None for side in sides)
    return before_it, after_it


def _read_span(client: Client, run: wire.Run, first: int, last: int) -> Span:
    """What was reported over some steps, as one point."""
    values: dict[str, Number | None] = {}
    lowest: dict[str, Number | None] = {}
    highest: dict[str, Number | None] = {}
    ranks: int | None = None
    world: int | None = None
    for own in _merged(client, run, first, last):
        if own.values:
            values[own.metric] = own.maximum[0] if own.metric in _COUNTS else own.values[0]
            lowest[own.metric], highest[own.metric] = own.minimum[0], own.maximum[0]
        for bound, found in (("low", own.low), ("high", own.high)):
            if found:
                values[f"{own.metric}_{bound}"] = found[0]
        ranks = own.ranks[0] if own.ranks else ranks
        world = own.expected_ranks[0] if own.expected_ranks else world
    begun = [(entry.attempt, entry.measured_from) for entry in run.attempts]
    attempt = max((number for number, begin in begun if begin is not None and begin <= last), default=None)
    return Span(first, last, values, lowest, highest, attempt, ranks, world)


def _merged(client: Client, run: wire.Run, first: int, last: int) -> list[wire.Series]:
    """The compared metrics that the run reported, each as one point over these steps."""
    logged = {*run.scalars, *(["clip_ratio"] if "grad_norm_unclipped" in run.scalars else [])}
    measured = [
        key for name in COMPARED_METRICS for key in run.latest if split_key(key)[0] == name and name in METRICS
    ]
    keys = [*measured, *(name for name in COMPARED_METRICS if name in logged)]
    found: list[wire.Series] = []
    for start in range(0, len(keys), _METRICS_A_QUESTION):
        some = keys[start : start + _METRICS_A_QUESTION]
        answer = client.series(run.run_id, some, points=1, first_step=first, last_step=last)
        found += [answer, *(answer.more.values() if isinstance(answer.more, dict) else ())]
    return found


class _Reader:
    """Reads the evidence of one incident of one run."""

    def __init__(self, client: Client, incident: wire.Incident, run: wire.Run) -> None:
        self._client, self._incident, self._run = client, incident, run
        self._alert: Alert | None = ALERTS.get(incident.alert)
        self._step = incident.step if incident.step is not None else run.last_step

    def read(self, events: Sequence[wire.Event]) -> IncidentEvidence:
        run, incident = self._run, self._incident
        metric = self._metric()
        # An alert on no metric of the run is still about some of its steps.
        key = metric or next((name for name in ("edq_ratio", "loss") if self._is_reported(name)), None)
        if key is None or self._step is None:
            return IncidentEvidence(incident, run, self._step, metric, events=events)
        every = run.watch.every if run.watch else 1
        last = self._step + STEPS_AFTER_ALERT * every
        series = self._client.series(run.run_id, key, points=_POINTS, axis="time", last_step=last)
        onset = self._onset(metric, series, last) if metric else None
        breach = self._breach(series) if metric and not onset else None
        resumed_at = self._resumed_at(onset, breach)
        ranges = self._ranges(series, onset, breach, resumed_at)
        before, after = (None if found is None else _read_span(self._client, run, *found) for found in ranges)
        highest, rising = self._so_far("learning_rate")
        return IncidentEvidence(
            incident,
            run,
            self._step,
            metric,
            series if metric else None,
            onset,
            breach,
            resumed_at,
            before,
            after,
            highest=highest,
            rising=rising,
            layers=self._layers(after),
            types={layer.name: layer.module_type for layer in self._client.layers(run.run_id).layers},
            events=events,
        )

    def _metric(self) -> str | None:
        metric = self._alert.metric(self._incident.labels) if self._alert else None
        if metric == "grad_norm" and "grad_norm_unclipped" in self._run.scalars:
            return "grad_norm_unclipped"
        return metric if metric is not None and self._is_reported(metric) else None

    def _is_reported(self, key: str) -> bool:
        return key in self._run.latest or key in self._run.scalars

    def _onset(self, metric: str, series: wire.Series, last: int) -> Onset | None:
        """A change that explains the alert, in the time that it covers, otherwise in the run up to it."""
        entry = METRICS.get(split_key(metric)[0])
        for first in dict.fromkeys((self._look_back(series), None)):
            onset = read_history(self._client, self._run.run_id, metric, first_step=first, last_step=last).onset
            if onset is None or self._step is None or onset.last_before >= self._step:
                continue
            if self._heals(onset):
                continue
            if entry is None or entry.ideal is None or onset.explains(entry.ideal, EDQ_TOLERANCE):
                return onset
        return None

    def _heals(self, onset: Onset) -> bool:
        """Whether a change led out of the alert's condition: the fault came before it."""
        return self._is_beyond(onset.before) is True and self._is_beyond(onset.after) is False

    def _look_back(self, series: wire.Series) -> int | None:
        fired = self._place(series, 0.0)
        place = min(self._place(series, self._seconds_looked_back()), fired - _FEWEST_POINTS)
        return series.first_steps[place] if place > 0 else None

    def _breach(self, series: wire.Series) -> Breach | None:
        """The newest consecutive steps up to the alert at which its condition held, if the values show that.

        Short breaches, such as residuals dropped at a resume, are searched for as far back as the alert looks. A
        merged point would hide them, so the extremes of its steps count there.
        """
        fired, oldest = self._place(series, 0.0), self._place(series, self._seconds_looked_back())
        beyond = [self._is_beyond(value) for value in series.values]
        found = _stretch(beyond, fired, fired) or _stretch(beyond, fired, oldest)
        if found is None:
            ends = zip(series.minimum, series.maximum, strict=True)
            beyond = [True in {self._is_beyond(value) for value in pair} for pair in ends]
            found = _stretch(beyond, fired, oldest)
        if found is None:
            return None
        first, last = found
        before = finite(series.values[first - 1]) if first else None
        extreme = series.minimum if before is not None and (finite(series.maximum[first]) or 0) <= before else None
        value = finite((extreme or series.maximum)[first])
        return Breach(series.first_steps[first], series.steps[last], before, value, last >= fired, first == 0)

    def _resumed_at(self, onset: Onset | None, breach: Breach | None) -> int | None:
        """The step of the resume at which the change came; with no change found, of the newest before the alert."""
        oldest = self._incident.started_at - self._seconds_looked_back()
        resumes = [
            attempt.measured_from
            for attempt in self._run.attempts
            if attempt.attempt > 1
            and attempt.measured_from is not None
            and attempt.measured_from <= (self._step or 0)
            and (onset or breach or oldest <= attempt.created_at <= self._incident.started_at)
        ]
        if onset is not None:
            resumes = [step for step in resumes if onset.last_before < step <= onset.first_changed]
        elif breach is not None:
            resumes = [step for step in resumes if step == breach.first_step]
        return max(resumes, default=None)

    def _seconds_looked_back(self) -> float:
        entry = self._alert
        return entry.for_seconds + max(entry.window_seconds, _LOOK_BACK_SECONDS) if entry else _LOOK_BACK_SECONDS

    def _is_beyond(self, value: Number | float | None) -> bool | None:
        """Whether a value meets one of the alert's conditions; None if a single value cannot decide."""
        found = {condition.is_beyond(from_number(value)) for condition in self._conditions() if value is not None}
        return True if True in found else None if None in found or not found else False

    def _conditions(self) -> list[Condition]:
        """Those on the curve of what fired."""
        entry, key = self._alert, self._incident.labels.get("key")
        about = None if key is None else {f"collage_{key}", f"collage_{split_key(key)[0]}"}
        return [one for one in (entry.drawn if entry else ()) if about is None or one.series in about]

    def _ranges(
        self, series: wire.Series, onset: Onset | None, breach: Breach | None, resumed_at: int | None
    ) -> list[tuple[int, int] | None]:
        """The steps before and after: beside the change, the breach or the resume; a breach that passed, while it
        was there. Otherwise before and after the time that the alert waits.

        Where that is older than the run, its beginning and its end so far are compared.
        """
        steps, firsts, fired = series.steps, series.first_steps, self._place(series, 0.0)
        waiting = self._place(series, self._alert.for_seconds if self._alert else 0.0)
        end = steps[-1] if steps else 0
        if onset is not None:
            last_before, first_after = onset.last_before, onset.settled
        elif breach is not None:
            last_before, first_after = breach.first_step - 1, breach.first_step
            end = end if breach.lasts else breach.last_step
        elif resumed_at is not None:
            last_before, first_after = resumed_at - 1, resumed_at
        else:
            last_before = steps[waiting] if steps else 0
            first_after = last_before + 1
        before = [place for place, step in enumerate(steps) if step <= last_before]
        after = [place for place, step in enumerate(firsts) if first_after <= step <= end]
        if onset is None and resumed_at is None and (breach.from_start if breach else waiting == 0):
            half = min(_BESIDE, (len(steps) + 1) // 2)
            before, after = list(range(half)), list(range(max(half, fired + 1 - _BESIDE), fired + 1))
        return [
            (firsts[places[0]], steps[places[-1]]) if places else None
            for places in (before[-_BESIDE:], after[:_BESIDE])
        ]

    def _place(self, series: wire.Series, seconds: float) -> int:
        """The newest point that is at least so many seconds older than the alert."""
        times = [finite(position) or 0.0 for position in series.positions]
        fired = max((place for place, step in enumerate(series.steps) if step <= (self._step or 0)), default=0)
        if not times:
            return 0
        return max(
            (place for place, time in enumerate(times[: fired + 1]) if time <= times[fired] - seconds), default=0
        )

    def _so_far(self, name: str) -> tuple[dict[str, float], dict[str, bool]]:
        """A logged scalar's largest value, and whether it was still rising when the alert fired."""
        if name not in self._run.scalars:
            return {}, {}
        series = self._client.series(self._run.run_id, name, points=_POINTS, last_step=self._step)
        largest = [value for entry in series.maximum if (value := finite(entry)) is not None]
        last = [value for entry in series.values[-2:] if (value := finite(entry)) is not None]
        rising = {name: _rises(*last)} if len(last) == 2 else {}
        return {name: max(largest)} if largest else {}, rising

    def _layers(self, span: Span | None) -> dict[str, dict[str, Number | None]]:
        found: dict[str, dict[str, Number | None]] = {}
        for key in _OF_LAYERS if span is not None else ():
            if key not in self._run.latest or span is None:
                continue
            heatmap = self._client.heatmap(
                self._run.run_id, key, points=1, first_step=span.first_step, last_step=span.last_step
            )
            for name, row in zip(heatmap.layers, heatmap.values, strict=True):
                found.setdefault(name, {})[key] = row[0] if row else None
        return found


def _rises(before: float, after: float) -> bool:
    """Whether a value grew by more than the rounding of a mean; a warm-up grows by 1/400 from point to point."""
    return after > before + 1e-6 * abs(before)


def _stretch(beyond: Sequence[bool | None], newest: int, oldest: int) -> tuple[int, int] | None:
    """The newest consecutive places beyond the bound, one of them in [oldest, newest]; unknown values do not end
    them."""
    found = next((place for place in range(newest, oldest - 1, -1) if beyond[place : place + 1] == [True]), None)
    if found is None:
        return None
    first = last = found
    for place in range(found, -1, -1):
        if beyond[place] is False:
            break
        first = place if beyond[place] else first
    for place in range(found, len(beyond)):
        if beyond[place] is False:
            break
        last = place if beyond[place] else last
    return first, last
