"""The alert catalogue: Prometheus rules, the runbook and the server's own evaluation are made from it.

The alerts on problems of a run are those of `collage_monitor.diagnosis`; the modules here hold the others.

Conditions are PromQL over the gauges of `/metrics`. `$window` stands for the window, `$warm_up` for the number of
first steps at which a run is not judged, `$settle` for those after a resume. Other packages add alerts: entry-point
group `collage_monitor.alerts`. Prometheus and the server both evaluate alerts that `about_runs` or
`about_the_server` makes of `Condition`s. An `Alert` with only a PromQL expression is left to Prometheus, and the
server says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from collage_monitor.alerts import changes, operation, training
from collage_monitor.diagnosis.alert import (
    RECORDED,
    Alert,
    Condition,
    Severity,
    about_runs,
    about_the_server,
    duration,
)
from collage_monitor.diagnosis.judge import PROBLEMS
from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions

__all__ = [
    "ALERTS",
    "Alert",
    "Condition",
    "RECORDED",
    "SEVERITIES",
    "Severity",
    "about_runs",
    "about_the_server",
    "alert",
    "duration",
    "enabled_alerts",
]

SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "critical")
_ALERTS = (
    *changes.ALERTS,
    *(problem.alert for problem in PROBLEMS if problem.alert is not None),
    *training.ALERTS,
    *operation.ALERTS,
)


def catalogue_of(own: Sequence[Alert], added: Mapping[str, Any]) -> dict[str, Alert]:
    """Alerts by name, those that other packages add (entry-point group `collage_monitor.alerts`) last.

    Raises:
        CatalogueError: what was added is no `Alert`, or its name is taken.
    """
    found = {entry.name: entry for entry in own}
    for name, entry in added.items():
        if not isinstance(entry, Alert):
            raise CatalogueError(f"collage_monitor.alerts {name!r} must be an Alert, not {type(entry).__name__}")
        if entry.name in found:
            raise CatalogueError(f"collage_monitor.alerts {name!r} adds {entry.name!r}, which is taken")
        found[entry.name] = entry
    return found


ALERTS: Final = catalogue_of(_ALERTS, extensions("collage_monitor.alerts"))


def alert(name: str) -> Alert:
    """The catalogue entry called `name`.

    Raises:
        CatalogueError: no such alert.
    """
    try:
        return ALERTS[name]
    except KeyError:
        raise CatalogueError(f"no alert is called {name!r}; choose one of {', '.join(ALERTS)}") from None


def enabled_alerts(severity: Severity | None = None) -> list[Alert]:
    """The alerts that are on by default; with a severity, these and all that are at least as severe."""
    least = len(SEVERITIES) if severity is None else SEVERITIES.index(severity)
    return [entry for entry in ALERTS.values() if entry.on_by_default or SEVERITIES.index(entry.severity) >= least]
