"""Limits on each project, so that no project fills the server for all.

`create_app` makes one of the settings; the store checks runs and layers by it in the transaction that adds them
(`tests/server/test_bounds.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.settings import FixedLimits
from collage_server.store import AccessStore, QuotaName

__all__ = ["Quotas"]


_REMEMBERED_SECONDS: Final = 10.0


@dataclass
class _Counted:
    """A project's counts, with this process's additions since."""

    count: int
    at: float


class Quotas:
    """Runs and tags are counted in the transaction that adds them, so requests in flight together cannot overshoot.

    Below half of a limit a count is cached for ten seconds, plus this server's own additions, so creating a run
    costs the same in a large project. Layers are counted before a run is created: many rows, for which no report
    should wait. A project can exceed its limit by the layers that concurrent requests and running runs still add,
    each run at most the wire's `layers_per_run`. Below half of the limit, other servers' additions within ten
    seconds come on top.
    """

    def __init__(
        self,
        runs: int,
        limits: FixedLimits,
        store: AccessStore,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = {"runs": runs, "tags": limits.tags_per_project, "layers": limits.layers_per_project}
        self._store = store
        self._monotonic = monotonic
        self._counted: dict[tuple[str, str], _Counted] = {}
        self._lock = Lock()

    def check_layers(self, project: str, create: wire.RunCreate) -> None:
        """Refuse a new run in a project that has its layers; resuming one is always allowed.

        Raises:
            Unprocessable: too many layers.
        """
        if self._store.project_of(create.run_id) is None:
            most = wire.LIMITS["layers_per_run"]
            self._judge(project, "layers", most, partial(self._store.count_layers, project))

    def check(self, project: str, what: QuotaName, added: int, count: Callable[[], int]) -> None:
        """For the store: check the project's counts, including a change that is not committed yet.

        Raises:
            Unprocessable: too many; the change is undone.
        """
        self._judge(project, what, added, count)

    def _judge(self, project: str, what: str, added: int, count: Callable[[], int]) -> None:
        with self._lock:
            known = self._counted.get((project, what))
            if known is not None and self._monotonic() - known.at < _REMEMBERED_SECONDS:
                known.count += added
                if 2 * known.count <= self._most[what]:
                    return
        counted = _Counted(count(), self._monotonic())
        with self._lock:
            # Only projects that grow now are remembered.
            over = [key for key, entry in self._counted.items() if counted.at - entry.at >= _REMEMBERED_SECONDS]
            for key in over:
                del self._counted[key]
            self._counted[project, what] = counted
        self._check(project, what, counted.count)

    def _check(self, project: str, what: str, count: int) -> None:
        most = self._most[what]
        if count > most:
            higher = "start the server with a higher COLLAGE_SERVER_RUNS_PER_PROJECT"
            raise Unprocessable(
                f"project {project!r} would hold {count} {what}, at most {most}; delete runs of it, or "
                f"{higher if what == 'runs' else 'put new ones into another project'}",
                field=f"{what}_per_project",
                limit=most,
            )
