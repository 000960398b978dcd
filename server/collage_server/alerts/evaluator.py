"""The evaluator: one of the servers on a database evaluates all runs against the catalogue, and stores the
incidents.

`condition_evaluation.py` says what holds, this decides who evaluates and keeps what begins and ends
(`store/runs/incidents.py`). That both evaluations agree is tested in `tests/alerts/test_both_evaluations.py`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from collage_monitor.alerts import Alert
from collage_server.alerts.condition_evaluation import AlertChange, Evaluation, Labels, Sample, identity_labels
from collage_server.background import BackgroundThread
from collage_server.errors import Gone, NotFound
from collage_server.memory_budget import MemoryBudget
from collage_server.store import NewIncident, Store
from collage_server.summariser import evaluate_what_fits

__all__ = ["AlertEvaluator", "AlertRounds"]

_LOG: Final = logging.getLogger(__name__)
_LEASE: Final = "alerts"
_LEASE_ROUNDS: Final = 4


class AlertRounds:
    """When alerts were last evaluated, by this server or the one that has the lease, as far as this one knows."""

    def __init__(self) -> None:
        self.evaluated_at: float | None = None
        self.is_mine: bool | None = None
        """Whether this server has the lease; None: it evaluates no alerts."""


class AlertEvaluator(BackgroundThread):
    """Evaluates `alerts` on `samples`, those of `/metrics`, once an interval, while this server has the lease.

    Incidents that are open when it begins are taken over. time_scale: shortens windows and waits, for a test.
    rounds: is told of each round.
    """

    def __init__(
        self,
        store: Store,
        samples: Callable[[], Iterable[Sample]],
        alerts: Iterable[Alert],
        *,
        clock: Callable[[], float],
        interval_seconds: float,
        time_scale: float = 1.0,
        rounds: AlertRounds | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        super().__init__("alerts", interval_seconds=interval_seconds, memory=memory)
        self._store = store
        self._samples = samples
        self._alerts = list(alerts)
        unread = [entry.name for entry in self._alerts if not entry.conditions]
        if unread:
            _LOG.warning(
                "Prometheus alone evaluates %s: made with about_runs, the server would, too", ", ".join(unread)
            )
        self._clock = clock
        self._time_scale = time_scale
        self._round_seconds = interval_seconds
        self._rounds = rounds or AlertRounds()
        self._holder = secrets.token_hex(16)
        self._evaluation: Evaluation | None = None
        self._unkept: dict[tuple[str, Labels], tuple[AlertChange, float]] = {}

    def stop(self, deadline_seconds: float) -> None:
        """End, and let another server go on at once."""
        super().stop(deadline_seconds)
        if self._evaluation is not None:
            self.attempt(lambda: self._store.incidents.give_up_lease(_LEASE, self._holder))
            self._evaluation = None

    def do_due_work(self) -> None:
        """Evaluate the alerts once, if no other server does."""
        now = self._clock()
        if not self._store.incidents.take_lease(_LEASE, self._holder, now, _LEASE_ROUNDS * self._round_seconds):
            self._evaluation = None
            self._rounds.is_mine = False
            self._rounds.evaluated_at = self._store.incidents.lease_taken_at(_LEASE)
            return
        if self._evaluation is None:
            self._evaluation = self._taken_over()
            self._unkept = {}
        for change in self._evaluation.observe(now, self._samples()):
            # Each change is sent once; one that cannot be stored now is tried again until the next change.
            self._unkept[change.alert.name, identity_labels(change.labels)] = change, now
        self._rounds.evaluated_at, self._rounds.is_mine = now, True
        for key, (change, changed_at) in list(self._unkept.items()):
            try:
                self._keep(change, changed_at)
            except Exception as error:
                self.log_failure(
                    error, f"{change.alert.name} cannot be kept; the next round tries again, the others go on"
                )
            else:
                self._unkept.pop(key, None)

    def _taken_over(self) -> Evaluation:
        evaluation = Evaluation(self._alerts, self._time_scale)
        by_name = {entry.name: entry for entry in self._alerts}
        for alert, labels, started_at, value in self._store.incidents.open_of_server():
            if alert in by_name:
                evaluation.resume(by_name[alert], tuple(sorted(labels.items())), started_at, value or 0.0)
        return evaluation

    def _keep(self, change: AlertChange, now: float) -> None:
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
        """The incident in the catalogue's words; for a run, with its present overview and step."""
        parts, step = [f"{alert.summary[0].upper()}{alert.summary[1:]}."], None
        with suppress(Gone, NotFound):
            if run_id:
                with self._store.points.snapshot() as snapshot:
                    record = snapshot.records([run_id])[run_id]
                    step, found = record.last_step, evaluate_what_fits(snapshot, record)[0]
                told = found.headline.rstrip(".").casefold() not in found.text.casefold()
                parts += [found.headline if told else "", f"Judged {found.health}: {found.text}", found.advised]
        return " ".join(filter(None, parts)), step
