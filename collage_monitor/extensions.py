"""Entries that other packages add to the catalogues through entry points: found by group and name, loaded once.

`GROUPS` lists them. Names of groups are fixed: packages of other people register under them; `examples/extension_*`
show one of each, and the tests run them.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from collage_monitor.errors import CatalogueError

__all__ = ["GROUPS", "extensions"]

GROUPS: Final = {
    "collage_monitor.statistics": "a statistic: how its totals merge and what is made of them",
    "collage_monitor.alerts": "an alert",
    "collage_monitor.strategies": "the description of a storage strategy",
    "collage_agent.statistics": "how a statistic is measured, under the name that its definition has",
    "collage_agent.strategies": "how a storage strategy keeps weights and states, under the same name",
    "collage_agent.rules": "an update rule",
    "collage_agent.mirrors": "a tracker to which a run's numbers are written, too",
}
"""Entry-point groups, and what an entry of each adds."""


@cache
def extensions(group: str) -> dict[str, Any]:
    """Name → object of everything that installed packages add to `group`, in the order of their names.

    Raises:
        CatalogueError: an entry cannot be imported, or two packages use one name.
    """
    found: dict[str, Any] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if point.name in found:
            raise CatalogueError(f"two packages add {point.name!r} to {group}: uninstall one, or rename its entry")
        try:
            found[point.name] = point.load()
        except Exception as error:
            raise CatalogueError(
                f"{group} {point.name!r} ({point.value}) cannot be loaded: {error}; uninstall or mend its package"
            ) from error
    return found
