"""The catalogue: every statistic that travels and every metric, the project's own and those of other packages.

Names of statistics and metrics are fixed for good: stored chunks, alerts and exports go by them
(`tests/contract/test_catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from collage_monitor.definitions import HISTOGRAM_LABELS, Definition, Metric, Statistic
from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions
from collage_monitor.statistics import (
    averages,
    casts,
    classes,
    counterfactuals,
    edq,
    element_counts,
    intervals,
    optimizer_state,
    several_steps,
    update_histogram,
)

__all__ = [
    "DEFINITIONS",
    "METRICS",
    "STATISTICS",
    "catalogue_of",
    "is_metric",
    "metric",
    "split_key",
    "statistic",
]

_Entry = TypeVar("_Entry", Statistic, Metric)

_OWN: Final = {
    "edq": edq.EDQ,
    "classes": classes.DEFINITION,
    "windows": several_steps.WINDOWS,
    "counterfactuals": counterfactuals.DEFINITION,
    "casts": casts.DEFINITION,
    "states": optimizer_state.STATES,
    "decay": optimizer_state.DECAY,
    "residuals": optimizer_state.RESIDUALS,
    "oracle": several_steps.ORACLE,
    "averages": averages.DEFINITION,
    "norms": edq.NORMS,
    "updates": update_histogram.DEFINITION,
    "counts": element_counts.DEFINITION,
    "intervals": intervals.DEFINITION,
    "replicas": element_counts.REPLICAS,
}


def catalogue_of(
    own: Mapping[str, Definition], added: Mapping[str, Any]
) -> tuple[dict[str, Statistic], dict[str, Metric]]:
    """(statistics, metrics) of the definitions, those that other packages added last.

    Raises:
        CatalogueError: a name that is taken, a metric of totals that nobody sends, or no `Definition` at all.
    """
    statistics: dict[str, Statistic] = {}
    metrics: dict[str, Metric] = {}
    for name, definition in added.items():
        if not isinstance(definition, Definition) or name in own:
            raise CatalogueError(
                f"collage_monitor.statistics {name!r} must be a Definition, under a name of its own"
            )
    for name, definition in [*own.items(), *added.items()]:
        for entry in definition.statistics:
            _add(statistics, entry, name)
        for made in definition.metrics:
            if name in added and made.exposed:
                raise CatalogueError(f"{name!r}: the gauges of /metrics are fixed; leave exposed out")
            _add(metrics, made, name)
    for made in metrics.values():
        for need in made.needs:
            if need not in statistics:
                raise CatalogueError(f"metric {made.name!r} needs {need!r}, which no definition sends")
    return statistics, metrics


def _add(entries: dict[str, _Entry], entry: _Entry, definition: str) -> None:
    if entry.name in entries or "/" in entry.name:
        raise CatalogueError(f"{definition!r} adds {entry.name!r}, which another definition has, or a slash")
    entries[entry.name] = entry


_added = extensions("collage_monitor.statistics")
DEFINITIONS: Final[Mapping[str, Definition]] = {**_OWN, **_added}
STATISTICS, METRICS = catalogue_of(_OWN, _added)


def split_key(key: str) -> tuple[str, str | None]:
    """("state_decrement_ratio/exp_avg_sq") → ("state_decrement_ratio", "exp_avg_sq"); no slash: label None."""
    name, slash, label = key.partition("/")
    return name, (label if slash else None)


def statistic(key: str) -> Statistic:
    """The catalogue entry of a statistic's key.

    Raises:
        CatalogueError: unknown name, or a label that is missing or not wanted.
    """
    return _look_up(key, STATISTICS, "statistic")


def metric(key: str) -> Metric:
    """The catalogue entry of a metric's key.

    Raises:
        CatalogueError: unknown name, or a label that is missing or not wanted.
    """
    return _look_up(key, METRICS, "metric")


def is_metric(key: str) -> bool:
    """Whether the key is a metric's; else it can only be a logged scalar's."""
    try:
        metric(key)
    except CatalogueError:
        return False
    return True


def _look_up(key: str, table: dict[str, _Entry], kind: str) -> _Entry:
    name, label = split_key(key)
    entry = table.get(name)
    if entry is None:
        raise CatalogueError(f"no {kind} is called {name!r}; GET /api/v1/metrics-catalogue lists them")
    if label is not None if entry.label is None else not label:
        wanted = f"a label, {name}/{entry.label.upper()}" if entry.label else "no label"
        raise CatalogueError(f"{kind} {key!r}: {name} takes {wanted}")
    if entry.label == "octave" and label not in HISTOGRAM_LABELS:
        raise CatalogueError(f"{kind} {key!r}: octaves run from {HISTOGRAM_LABELS[1]} to {HISTOGRAM_LABELS[-2]}")
    if entry.label == "method/dtype" and not all(str(label).partition("/")[::2]):
        raise CatalogueError(f"{kind} {key!r}: {name} takes a method and a dtype, {name}/light/bf16")
    if entry.label == "steps" and not str(label).isdigit():
        raise CatalogueError(f"{kind} {key!r}: a window's label is its length in steps, {name}/64")
    if entry.label in ("format", "format/steps"):
        cast, slash, steps = str(label).partition("/")
        if not casts.is_copy(cast) or (entry.label == "format" and slash):
            raise CatalogueError(
                f"{kind} {key!r}: formats of copies are {', '.join(casts.FORMATS)}, and bf16>FORMAT"
            )
        if entry.label == "format/steps" and not steps.isdigit():
            raise CatalogueError(f"{kind} {key!r}: {name} takes a format and a length in steps, {name}/bf16/64")
    if entry.label == "routes" and not casts.is_route_pair(str(label)):
        raise CatalogueError(f"{kind} {key!r}: {name} takes two routes to one format, {name}/mxfp8/bf16>mxfp8")
    return entry
