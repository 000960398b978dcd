"""What one project may hold, so that no project fills the server for all."""

from __future__ import annotations

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.settings import FixedLimits
from collage_server.store import AccessStore, QuotaName

__all__ = ["Quotas"]


class Quotas:
    """Runs and tags are counted in the transaction that adds them, so requests in flight together cannot overshoot.

    Layers are counted before a run is created: many rows, for which no report should wait. A project overshoots by
    what requests in flight and its running runs still add, each run at most the wire's `layers_per_run`.
    """

    def __init__(self, runs: int, limits: FixedLimits, store: AccessStore) -> None:
        self._most = {"runs": runs, "tags": limits.tags_per_project, "layers": limits.layers_per_project}
        self._store = store

    def check_layers(self, project: str, create: wire.RunCreate) -> None:
        """Refuse a new run in a project that has its layers; resuming one is always allowed.

        Raises:
            Unprocessable: too many layers.
        """
        if self._store.project_of(create.run_id) is None:
            self._check(project, "layers", self._store.count_layers(project))

    def check(self, project: str, what: QuotaName, count: int) -> None:
        """For the store: judge what the project holds with a change that is not committed yet.

        Raises:
            Unprocessable: too many; the change is undone.
        """
        self._check(project, what, count)

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
