"""The messenger: notifies every target of incidents that fire and end, and retries until the target accepts the
message.

The holder of a lease sends for all servers. Which targets there are is settled in `targets.py`
(`tests/alerts/test_messages.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from collage_monitor import wire
from collage_monitor.backoff import Backoff
from collage_server.alerts.targets import Target
from collage_server.background import BackgroundThread
from collage_server.dependencies import Dependency
from collage_server.store import Store

__all__ = ["Messenger"]

_LEASE: Final = "messages"
_LEASE_SECONDS: Final = 120.0
_FIRST_PAUSE_SECONDS: Final = 2.0
_LONGEST_PAUSE_SECONDS: Final = 300.0
_GIVE_UP_SECONDS: Final = 86_400.0


class Messenger(BackgroundThread):
    """Sends the due messages, from one of the servers on a database; the database records deliveries.

    If a target accepted a message but the delivery could not be recorded, it is sent again. A silenced incident is
    due no message while the silence holds. A target hears that an incident ended only if it heard that it fired.
    After a day without success a message is given up.
    """

    def __init__(
        self, store: Store, targets: Sequence[Target], *, clock: Callable[[], float], interval_seconds: float
    ) -> None:
        super().__init__("messenger", interval_seconds=interval_seconds)
        self._store = store
        self._targets = targets
        self._clock = clock
        self._holder = secrets.token_hex(16)
        self._backoffs = {target.name: Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS) for target in targets}
        self._not_before = dict.fromkeys(self._backoffs, float("-inf"))
        self.dependencies = {target.name: Dependency(f"messages to {target.name}") for target in targets}

    def do_due_work(self) -> None:
        """Send the due messages, if no other server does."""
        now = self._clock()
        if not self._store.incidents.take_lease(_LEASE, self._holder, now, _LEASE_SECONDS):
            return
        for incident, sent in self._store.incidents.unsettled(now):
            if self.stopping.is_set():
                return
            if not incident.silenced:
                self._tell(incident, sent)

    def stop(self, deadline_seconds: float) -> None:
        """End, and let another server go on at once."""
        super().stop(deadline_seconds)
        self.attempt(lambda: self._store.incidents.give_up_lease(_LEASE, self._holder))

    def _tell(self, incident: wire.Incident, sent: list[str]) -> None:
        """Notify each target that has not been notified; record the deliveries."""
        settled, before = True, list(sent)
        for target in self._targets:
            mark = f"{target.name}/{incident.state}"
            unheard = incident.state == "resolved" and f"{target.name}/firing" not in sent
            if mark in sent or unheard:
                continue
            if self._send(target, incident):
                sent.append(mark)
            elif self._is_young(incident):
                settled = False
        if settled or sent != before:
            self._store.incidents.mark_sent(incident, sent, settled=settled)

    def _is_young(self, incident: wire.Incident) -> bool:
        changed_at = incident.started_at if incident.resolved_at is None else incident.resolved_at
        return self._clock() - changed_at < _GIVE_UP_SECONDS

    def _send(self, target: Target, incident: wire.Incident) -> bool:
        """Try once, if the target's last failure is long enough ago."""
        now = self._clock()
        # A clock that has been set back must not make a pause longer.
        if 0 < self._not_before[target.name] - now <= _LONGEST_PAUSE_SECONDS:
            return False
        try:
            target.send(incident)
        except Exception as error:
            pause = self._backoffs[target.name].pause()
            self._not_before[target.name] = now + pause
            # The error's text may hold the target's address, and that a secret.
            self.dependencies[target.name].fails(f"it took none ({type(error).__name__}); the next try follows")
            return False
        self._backoffs[target.name].reset()
        self.dependencies[target.name].works()
        return True
