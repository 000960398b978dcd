"""Hears of alerts: polls the server for a run's alerts, and calls back, in a thread of its own.

`on_alert` of `session.py` starts it; nothing of measuring waits for it (`tests/alerts/test_listening.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Final

from collage_agent.transport.envelope import WORKER_THREAD_NAME
from collage_monitor.client import Client
from collage_monitor.errors import CollageError
from collage_monitor.wire import Incident

__all__ = ["AlertCallback", "AlertListener"]

AlertCallback = Callable[[Incident], object]
_LOG: Final = logging.getLogger("collage_agent")


class AlertListener:
    """Calls each callback once for each incident that fires while it listens, oldest first.

    It never raises, and never touches the training thread: a callback runs in this listener's own thread. If the
    server is away, the next poll asks again. `token` is asked before each request, `over` ends it.
    """

    def __init__(
        self,
        address: str,
        token: Callable[[], str | None],
        run_id: str,
        callbacks: Sequence[AlertCallback],
        *,
        every_seconds: float,
        over: Callable[[], bool],
    ) -> None:
        self._address = address
        self._token = token
        self._run_id = run_id
        self._callbacks = callbacks
        self._every_seconds = every_seconds
        self._over = over
        self._told: set[tuple[int, str]] = set()
        self._stopped = Event()

    def start(self) -> None:
        """Begin to listen."""
        # The name keeps the HTTP client's line a request out of the training's log, as for the sending thread.
        Thread(target=self._listen, name=WORKER_THREAD_NAME, daemon=True).start()

    def stop(self) -> None:
        """Listen no more; a callback that runs goes on."""
        self._stopped.set()

    def ask(self) -> None:
        """Ask once, and call back for what is new."""
        with suppress(CollageError, OSError), Client(self._address, self._token()) as client:
            for incident in sorted(client.firing(self._run_id), key=lambda found: found.started_at):
                self._tell(incident)

    def _listen(self) -> None:
        while not self._stopped.wait(self._every_seconds) and not self._over():
            try:
                self.ask()
            except Exception:
                _LOG.exception("asking for alerts failed; the next turn asks again, training is not affected")

    def _tell(self, incident: Incident) -> None:
        for number, callback in enumerate(list(self._callbacks)):
            if (number, incident.incident_id) in self._told:
                continue
            self._told.add((number, incident.incident_id))
            try:
                callback(incident)
            except (Exception, SystemExit):
                _LOG.exception("the callback for alerts failed on %s; training is not affected", incident.alert)
