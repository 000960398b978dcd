"""From stored points to answers: pure functions, no database, no web."""

from collage_monitor.statistics import statistics_for
from collage_server.queries.clipping import CLIP_RATIO, UNCLIPPED, clip_ratio
from collage_server.queries.compare import MEAN_OF_LAST, compared_run, merged_metrics, run_summary
from collage_server.queries.correlation import RunValue, correlation, last_metric, last_scalar
from collage_server.queries.events import alert_event
from collage_server.queries.finished import number, numbers
from collage_server.queries.heatmap import heatmap
from collage_server.queries.histogram import histogram
from collage_server.queries.latest import WORST_LAYERS, latest_answer, run_answer, state_at, state_of
from collage_server.queries.series import Positions, metric_series, scalar_series
from collage_server.queries.side_by_side import concatenated
from collage_server.queries.worst import worst_layers, worst_order

__all__ = [
    "CLIP_RATIO",
    "MEAN_OF_LAST",
    "Positions",
    "RunValue",
    "UNCLIPPED",
    "WORST_LAYERS",
    "alert_event",
    "clip_ratio",
    "compared_run",
    "concatenated",
    "correlation",
    "heatmap",
    "histogram",
    "last_metric",
    "last_scalar",
    "latest_answer",
    "merged_metrics",
    "metric_series",
    "number",
    "numbers",
    "run_answer",
    "run_summary",
    "scalar_series",
    "state_at",
    "state_of",
    "statistics_for",
    "worst_layers",
    "worst_order",
]
