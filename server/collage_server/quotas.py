"""What one project may hold, so that no project fills the server for all."""

from __future__ import annotations

from collections.abc import Sequence

from collage_monitor import wire
from collage_server.errors import Unprocessable
from collage_server.settings import Settings
from collage_server.store import AccessStore

__all__ = ["Quotas"]


class Quotas:
    """Checked before a run is created or tagged; requests in flight together may overshoot by their number.

    Layers are counted when a run is created, so a project overshoots by what its own running runs still add,
    each at most the wire's `layers_per_run`.
    """

    def __init__(self, settings: Settings, store: AccessStore) -> None:
        self._settings = settings
        self._store = store

    def check_create(self, project: str, create: wire.RunCreate) -> None:
        """Refuse a new run beyond the project's quota; resuming one is always allowed.

        Raises:
            Unprocessable: too many runs, tags or layers.
        """
        if self._store.project_of(create.run_id) is not None:
            if create.tags:
                self.check_tags(project, create.tags)
            return
        usage = self._store.usage(project, create.tags)
        _check(project, "runs", usage.runs + 1, self._settings.runs_per_project)
        _check(project, "tags", usage.tags, self._settings.tags_per_project)
        _check(project, "layers", usage.layers, self._settings.layers_per_project)

    def check_tags(self, project: str, tags: Sequence[str]) -> None:
        """Refuse tags beyond the project's quota.

        Raises:
            Unprocessable: too many.
        """
        _check(project, "tags", self._store.usage(project, tags).tags, self._settings.tags_per_project)


def _check(project: str, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise Unprocessable(
            f"project {project!r} would hold {count} {what}, at most {limit}; delete runs of it, or start the "
            f"server with a higher COLLAGE_SERVER_{what.upper()}_PER_PROJECT",
            field=f"{what}_per_project",
            limit=limit,
        )
