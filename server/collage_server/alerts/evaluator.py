"""The evaluator: one server of those on a database judges all runs by the catalogue, and keeps what fires."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

from collage_monitor.alerts import Alert
from collage_monitor.alerts.evaluation import Change, Evaluation, Sample
from collage_monitor.onset import describe
from collage_monitor.wire import from_number
from collage_server.background import BackgroundThread
from collage_server.errors import Gone, NotFound
from collage_server.queries.judgement import judgement_of, onset_of
from collage_server.store import IncidentQuery, NewIncident, RunQuery, RunRecord, Store

__all__ = ["AlertEvaluator"]

_LOG: Final = logging.getLogger(__name__)
_LEASE: Final = "alerts"
_LEASE_ROUNDS: Final = 4
_PAGE: Final = 500
_JUDGE_ROUNDS: Final = 4
"""A run is judged anew at most every so many rounds: each time its points are read."""
_NOT_AGAINST: Final = frozenset({"healthy", "unknown"})
_MOST_OPEN: Final = 100_000


class AlertEvaluator(BackgroundThread):
    """Evaluates `alerts` on `samples`, those of `/metrics`, once an interval, while this server has the lease.

    Incidents that are open when it begins are taken over. time_scale: shortens windows and waits, for a test.
    """

    def __init__(
        self,
        store: Store,
        samples: Callable[[], Iterable[Sample]],
        alerts: Iterable[Alert],
        *,
        clock: Callable[[], float],
        interval_seconds: float,
        stale_after_seconds: float,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__("alerts", interval_seconds=interval_seconds)
        self._store = store
        self._samples = samples
        self._alerts = list(alerts)
        self._clock = clock
        self._stale_after_seconds = stale_after_seconds
        self._time_scale = time_scale
        self._round_seconds = interval_seconds
        self._holder = secrets.token_hex(16)
        self._evaluation: Evaluation | None = None
        self._judged: dict[str, tuple[float, int]] = {}
        self._findings: dict[str, dict[str, float]] = {}

    def stop(self, deadline_seconds: float) -> None:
        """End, and let another server go on at once."""
        super().stop(deadline_seconds)
        if self._evaluation is not None:
            self.attempt(lambda: self._store.incidents.give_up_lease(_LEASE, self._holder))
            self._evaluation = None

    def do_due_work(self) -> None:
        """Evaluate the alerts once, if no other server does."""
        now = self._clock()
        ends_at = now + _LEASE_ROUNDS * self._round_seconds
        if not self._store.incidents.take_lease(_LEASE, self._holder, now, ends_at):
            self._evaluation = None
            return
        if self._evaluation is None:
            self._evaluation = self._taken_over()
        self.attempt(lambda: self._judge_runs(now))
        for change in self._evaluation.observe(now, self._samples()):
            self._keep(change, now)

    def _taken_over(self) -> Evaluation:
        evaluation = Evaluation(self._alerts, self._time_scale)
        by_name = {entry.name: entry for entry in self._alerts}
        for open_one in self._store.incidents.read(IncidentQuery(state="firing", limit=_MOST_OPEN), self._clock()):
            entry = by_name.get(open_one.alert)
            if entry is not None and open_one.source == "server":
                value = 0.0 if open_one.value is None else from_number(open_one.value)
                labels = tuple(sorted(open_one.labels.items()))
                evaluation.resume(entry, labels, open_one.started_at, value)
        self._findings = self._store.incidents.findings()
        return evaluation

    def _keep(self, change: Change, now: float) -> None:
        labels = dict(change.labels)
        if not change.firing:
            self._store.incidents.resolve(change.alert.name, labels, "server", now)
            return
        run_id = labels.get("run_id", "")
        text, step = self._reason(change.alert, run_id)
        new = NewIncident(
            alert=change.alert.name,
            severity=change.alert.severity,
            source="server",
            labels=labels,
            text=text,
            started_at=now,
            run_id=run_id,
            project=labels.get("project", ""),
            value=change.value,
            step=step,
        )
        if self._store.incidents.fire(new, now):
            _LOG.warning("%s fires (run %s): %s", new.alert, run_id or "-", text)

    def _reason(self, alert: Alert, run_id: str) -> tuple[str, int | None]:
        """What fired, in the catalogue's words; of a run its judgement, since when EDQ changed, and its step."""
        parts, step = [f"{alert.summary[0].upper()}{alert.summary[1:]}."], None
        with suppress(Gone, NotFound):
            if run_id:
                with self._store.points.snapshot() as snapshot:
                    record = snapshot.records([run_id])[run_id]
                    step = record.last_step
                    found = judgement_of(snapshot, run_id, record.watch, by_layer=True)
                    onset = onset_of(snapshot, run_id)
                parts.append(f"Judged {found.health}: {found.text}")
                parts += [f"{describe(onset, 'EDQ')}."] if onset is not None else []
        return " ".join(parts), step

    def _judge_runs(self, now: float) -> None:
        """Keep what the judgement holds against each run that has moved; half a round's time at most."""
        ends = time.monotonic() + self._round_seconds / 2
        running = {record.run_id: record for record in self._running(now)}
        for run_id in self._findings.keys() - running.keys():
            self._keep_findings(run_id, 0, {})
        self._judged = {run_id: place for run_id, place in self._judged.items() if run_id in running}
        # Who waits longest comes first: with many runs a round does not reach them all.
        for record in sorted(running.values(), key=lambda one: self._judged.get(one.run_id, (0.0, 0))[0]):
            at, reports = self._judged.get(record.run_id, (float("-inf"), -1))
            due = now - at >= (_JUDGE_ROUNDS - 0.5) * self._round_seconds
            if reports != record.reports and due:
                if self.stopping.is_set() or time.monotonic() > ends:
                    return
                self._judged[record.run_id] = (now, record.reports)
                with suppress(Gone, NotFound):
                    self._judge_run(record)

    def _judge_run(self, record: RunRecord) -> None:
        with self._store.points.snapshot() as snapshot:
            found = judgement_of(snapshot, record.run_id, record.watch)
        against = {
            finding.key: finding.value
            for finding in found.findings
            if finding.health not in _NOT_AGAINST and finding.value is not None
        }
        self._keep_findings(record.run_id, found.last_step or 0, against)

    def _keep_findings(self, run_id: str, step: int, findings: dict[str, float]) -> None:
        if findings != self._findings.get(run_id, {}):
            self._store.incidents.keep_findings(run_id, step, findings)
            self._findings[run_id] = findings
        if not findings:
            self._findings.pop(run_id, None)

    def _running(self, now: float) -> Iterator[RunRecord]:
        cursor: str | None = None
        while True:
            query = RunQuery(state="running", cursor=cursor, limit=_PAGE)
            page = self._store.runs.page(query, now, self._stale_after_seconds)
            yield from page.runs
            cursor = page.cursor
            if cursor is None:
                return
