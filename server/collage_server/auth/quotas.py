"""What one project may hold, so that no project fills the server for all."""

from __future__ import annotations

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.settings import Settings
from collage_server.store import AccessStore, QuotaName

__all__ = ["Quotas"]


class Quotas:
    """Runs and tags are counted in the transaction that adds them, so requests in flight together cannot overshoot.

    Layers are counted before a run is created: many rows, for which no report should wait. A project overshoots by
    what requests in flight and its running runs still add, each run at most the wire's `layers_per_run`.
    """

    def __init__(self, settings: Settings, store: AccessStore) -> None:
        self._settings = settings
        self._store = store

    def check_layers(self, project: str, create: wire.RunCreate) -> None:
        """Refuse a new run in a project that has its layers; resuming one is always allowed.

        Raises:
            Unprocessable: too many layers.
        """
        if self._store.project_of(create.run_id) is None:
            _check(project, "layers", self._store.count_layers(project), self._settings.layers_per_project)

    def check(self, project: str, what: QuotaName, count: int) -> None:
        """For the store: judge what the project holds with a change that is not committed yet.

        Raises:
            Unprocessable: too many; the change is undone.
        """
        limits = {"runs": self._settings.runs_per_project, "tags": self._settings.tags_per_project}
        _check(project, what, count, limits[what])


def _check(project: str, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise Unprocessable(
            f"project {project!r} would hold {count} {what}, at most {limit}; delete runs of it, or start the "
            f"server with a higher COLLAGE_SERVER_{what.upper()}_PER_PROJECT",
            field=f"{what}_per_project",
            limit=limit,
        )
