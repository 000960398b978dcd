"""Finishing: from merged totals to ratios, norms and intervals. Undefined is NaN here, null on the wire.

Readers on all sides finish by it, so that the same totals give the same number in the terminal, an answer and SQL
(`tests/contract/test_finish.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np

from collage_monitor.definitions import (
    HISTOGRAM_LABELS,
    Array,
    Metric,
    as_is,
    cosine,
    noise_ratio,
    ratio,
    root_ratio,
)
from collage_monitor.statistics import intervals as estimates
from collage_monitor.statistics.catalogue import METRICS, STATISTICS, metric, split_key
from collage_monitor.statistics.classes import share_known, share_of_active, share_of_finite
from collage_monitor.statistics.merge import Totals
from collage_monitor.statistics.update_histogram import histogram_counts

__all__ = [
    "finish",
    "finish_all",
    "finished",
    "finished_interval",
    "has_interval",
    "interval",
    "metric_keys",
    "metric_sql",
    "quoted_name",
    "statistics_for",
]


def finish(key: str, totals: Totals) -> Array:
    """The metric `key` of merged totals, elementwise over their common shape; NaN where it is undefined.

    Raises:
        CatalogueError: no such metric, or a wrong label.
    """
    entry, (_, label) = metric(key), split_key(key)
    try:
        amounts = [_total(need, entry, label, totals) for need in entry.needs]
    except KeyError:
        shape = np.shape(next(iter(totals.values()))) if totals else ()
        return np.full(shape, np.nan)
    missing = np.full(np.shape(amounts[0]), np.nan)
    others = [totals.get(_keys_of(name, entry, label)[0], missing) for name in entry.optional]
    return entry.finish(*amounts, *others, **({"label": label} if entry.finish_takes_label else {}))


def interval(key: str, totals: Totals) -> tuple[Array, Array]:
    """(low, high) of the 95 % interval of the metric `key`; NaN where it is undefined.

    Undefined: a zero denominator, variances not reported, or fewer than MINIMUM_BLOCKS sampled blocks with
    u ≠ 0 unless every element was measured, where the width is zero.

    Raises:
        KeyError: the metric has no interval, or its totals are not there.
    """
    pair = METRICS[key].interval
    if pair is None:
        raise KeyError(f"{key} has no interval")
    return estimates.bounds(key, pair, totals)


def has_interval(key: str, totals: Iterable[str]) -> bool:
    """Whether totals with these keys make an interval of the metric `key`: it needs the variances, too."""
    entry = METRICS.get(key)
    return entry is not None and entry.interval is not None and f"variance_numerator/{key}" in totals


def statistics_for(key: str, *, intervals: bool = True) -> tuple[str, ...]:
    """Keys of the statistics that the metric `key` is made of, and its interval too, with `intervals`.

    Raises:
        CatalogueError: no such metric, or a wrong label.
    """
    entry, (name, _) = metric(key), split_key(key)
    keys = [found for taken in _arguments_of(key) for found in taken]
    if intervals and entry.interval is not None:
        keys += estimates.needed_for(name, entry.interval)
    return tuple(dict.fromkeys(keys))


def metric_keys(statistics: Iterable[str]) -> list[str]:
    """Keys of all metrics that statistics with these keys can make, in the order of the catalogue."""
    labels: dict[str, list[str]] = {}
    for key in statistics:
        name, label = split_key(key)
        labels.setdefault(name, []).append(label or "")
    keys = []
    for name, entry in METRICS.items():
        if all(need in labels for need in entry.needs):
            keys += [f"{name}/{label}" for label in labels[entry.needs[0]]] if entry.label else [name]
    return keys


def finish_all(totals: Totals, *, intervals: bool = True) -> dict[str, Array]:
    """Every metric that the totals can make; a 95 % interval is NAME_low and NAME_high."""
    finished = {}
    for key in metric_keys(totals):
        finished[key] = finish(key, totals)
        if intervals and has_interval(key, totals):
            finished[f"{key}_low"], finished[f"{key}_high"] = interval(key, totals)
    return finished


def _arguments_of(key: str) -> list[list[str]]:
    """The keys of the statistics behind each argument of `finish`: a histogram has several."""
    entry, (_, label) = metric(key), split_key(key)
    return [_keys_of(need, entry, label) for need in (*entry.needs, *entry.optional)]


def _total(need: str, entry: Metric, label: str | None, totals: Totals) -> Array:
    if STATISTICS[need].label == "octave":
        return histogram_counts(totals, need)
    return totals[f"{need}/{label}" if _shares_label(need, entry) else need]


def _keys_of(need: str, entry: Metric, label: str | None) -> list[str]:
    if STATISTICS[need].label == "octave":
        return [f"{need}/{octave}" for octave in HISTOGRAM_LABELS]
    return [f"{need}/{label}" if _shares_label(need, entry) else need]


def _shares_label(need: str, entry: Metric) -> bool:
    return entry.label is not None and STATISTICS[need].label == entry.label


def finished(key: str, totals: Totals, shape: tuple[int, ...]) -> Array:
    """`finish`, but NaN for empty totals, from which the run cannot make the metric."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.array(np.broadcast_to(finish(key, totals), shape))


def finished_interval(key: str, totals: Totals) -> tuple[Array, Array] | None:
    """(low, high) of a metric that has an interval and whose variances were reported, else None."""
    if not has_interval(key, totals):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(key, totals)


def _ratio_sql(over: str, under: str) -> str:
    return f"{over} / nullif({under}, 0)"


def _root_sql(value: str) -> str:
    # DuckDB raises where numpy says NaN.
    return f"sqrt(case when {value} >= 0 then {value} end)"


def _share_of_active_sql(part: str, elements: str, nonfinite: str, idle: str, *classes: str) -> str:
    return _ratio_sql(part, f"coalesce({' + '.join(classes)}, {elements} - {nonfinite} - {idle})")


_IN_SQL: Final[Mapping[Callable[..., Any], Callable[..., str]]] = {
    as_is: lambda total: total,
    ratio: _ratio_sql,
    root_ratio: lambda over, under: _root_sql(_ratio_sql(over, under)),
    noise_ratio: lambda variance, under: _ratio_sql(_root_sql(variance), f"abs({under})"),
    np.sqrt: _root_sql,
    cosine: lambda product, one, other: _ratio_sql(product, f"({_root_sql(one)} * {_root_sql(other)})"),
    share_of_active: _share_of_active_sql,
    share_of_finite: lambda part, elements, nonfinite: _ratio_sql(part, f"({elements} - {nonfinite})"),
    share_known: lambda lost, distorted, faithful, idle, elements, nonfinite: _ratio_sql(
        f"({lost} + {distorted} + {faithful} + {idle})", f"({elements} - {nonfinite})"
    ),
}
"""Finishing function of the catalogue → the same in SQL, null for NaN."""


def quoted_name(name: str) -> str:
    """A name quoted for SQL, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def metric_sql(key: str, statistics: Collection[str]) -> str | None:
    """The metric `key` of merged totals, each a column under its key: null for NaN.

    None if it is not a ratio of totals, but made from a histogram or by a function of its own.

    Raises:
        CatalogueError: no such metric, or a wrong label.
    """
    finish = _IN_SQL.get(metric(key).finish)
    taken = _arguments_of(key)
    needs = [keys[0] for keys in taken]
    if finish is None or any(len(keys) > 1 for keys in taken):
        return None
    columns = [quoted_name(need) if need in statistics else "cast(null as double)" for need in needs]
    return finish(*columns)
