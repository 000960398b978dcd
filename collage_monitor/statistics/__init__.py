"""The diagnostics, one family per file, and the common operations: merging totals, finishing them into metrics."""

from collage_monitor.statistics.finish import (
    finish,
    finish_all,
    finished,
    finished_interval,
    has_interval,
    interval,
    metric_keys,
    metric_sql,
    quoted_name,
    statistics_for,
)
from collage_monitor.statistics.merge import (
    Totals,
    merge,
    merge_shards,
    merge_starts,
    merge_steps,
    reduce_shards,
    reduce_steps,
)
from collage_monitor.statistics.update_histogram import histogram_counts, histogram_quantile

__all__ = [
    "Totals",
    "finish",
    "finish_all",
    "finished",
    "finished_interval",
    "has_interval",
    "histogram_counts",
    "histogram_quantile",
    "interval",
    "merge",
    "merge_shards",
    "merge_starts",
    "merge_steps",
    "metric_keys",
    "metric_sql",
    "quoted_name",
    "reduce_shards",
    "reduce_steps",
    "statistics_for",
]
