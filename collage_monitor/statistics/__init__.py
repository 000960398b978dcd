"""Merging totals and finishing them into ratios, norms and intervals: the one set of functions all rooms share."""

from collage_monitor.statistics.finish import finish, finish_all, metric_keys
from collage_monitor.statistics.histogram import histogram_counts, histogram_quantile
from collage_monitor.statistics.intervals import INTERVAL_PAIRS, interval
from collage_monitor.statistics.merge import (
    Totals,
    merge,
    merge_shards,
    merge_steps,
    reduce_shards,
    reduce_steps,
)

__all__ = [
    "INTERVAL_PAIRS",
    "Totals",
    "finish",
    "finish_all",
    "histogram_counts",
    "histogram_quantile",
    "interval",
    "merge",
    "merge_shards",
    "merge_steps",
    "metric_keys",
    "reduce_shards",
    "reduce_steps",
]
