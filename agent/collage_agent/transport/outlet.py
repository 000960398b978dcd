"""One process's way out: queue, worker, courier, delivery and spool, put together from a run's settings."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from collage_agent.launch.identity import Identity
from collage_agent.settings import Resume, Settings
from collage_agent.transport.courier import Courier
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import Transport
from collage_agent.transport.http import HttpTransport
from collage_agent.transport.queue import BoundedQueue
from collage_agent.transport.replay import Replay
from collage_agent.transport.reports import Item
from collage_agent.transport.spool import SpoolFile, spool_path
from collage_agent.transport.worker import FinalState, Worker
from collage_monitor.errors import CollageError

__all__ = ["Outlet"]


class Outlet:
    """Takes items from the training thread without blocking it. The worker thread begins with the first call.

    A given transport is used as it is; otherwise online mode makes one for the server, which then also gets what
    earlier processes left in the same folder. Offline mode has none.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        transport: Transport | None,
        *,
        resume: Resume,
        on_away: Callable[[CollageError], None],
    ) -> None:
        limits = settings.limits
        self.spool = SpoolFile(spool_path(settings.folder, identity.run_id, identity.stream_id), limits.spool_bytes)
        self._limits = limits
        self._resume = resume
        self._queue: BoundedQueue[Item] = BoundedQueue(limits.queue_items, limits.queue_bytes)
        ending = threading.Event()
        replay = None
        if settings.mode == "offline":
            transport = None
        elif transport is None:
            transport = HttpTransport(
                settings.address, lambda: settings.token, limits, check_first=settings.server_url is None
            )
            replay = Replay(settings.folder, self.spool.path, transport, limits, ending.wait, on_away)
        self._delivery = Delivery(transport, self.spool, limits, wait=ending.wait, on_away=on_away)
        self._courier = Courier(settings, identity, self._delivery, self._dropped_before_delivery)
        self._worker = Worker(self._queue, self._courier, self._delivery, transport, limits, ending, replay)
        self._begun = False

    def begin(self) -> None:
        """Start the worker and introduce the run, once."""
        if not self._begun:
            self._begun = True
            self._worker.start(lambda: self._courier.introduce_run(self._resume))

    def put(self, item: Item) -> None:
        """Leave an item for the worker; when there is no room the oldest report goes."""
        self.begin()
        self._queue.put(item)

    def prepare(self, item: Item) -> None:
        """Leave an item that is needed only if others follow: the worker does not begin for it."""
        self._queue.put(item)

    def finish(self, state: FinalState, seconds: float | None = None) -> bool:
        """Flush within a deadline, `limits.finish_seconds` unless told; True when nothing is left to do."""
        return not self._begun or self._worker.finish(
            state, self._limits.finish_seconds if seconds is None else seconds
        )

    def forget(self) -> None:
        """In a forked child: let go of what belongs to the parent, without touching its locks."""
        self.spool.forget()

    @property
    def reports_sent(self) -> int:
        """Reports that the server has acknowledged, stored now or before."""
        return self._delivery.sent

    @property
    def reports_spooled(self) -> int:
        """Reports that wait in the spool."""
        return self.spool.reports

    @property
    def reports_dropped(self) -> dict[str, int]:
        """Reports given up, by reason."""
        dropped = Counter(self._delivery.dropped) + self._worker.dropped
        return dict(dropped + Counter(queue_full=self._queue.dropped))

    @property
    def cpu_seconds(self) -> float:
        """CPU of the worker thread so far."""
        return self._worker.cpu_seconds

    @property
    def sends(self) -> bool:
        """Whether the server took the last message."""
        return self._delivery.last_error is None and self._delivery.stopped is None

    def _dropped_before_delivery(self) -> int:
        return self._queue.dropped + self._worker.dropped.total()
