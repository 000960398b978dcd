"""From stored points to answers: pure functions, no database, no web."""

from collage_server.queries.correlation import RunValue, correlation, last_metric, last_scalar
from collage_server.queries.curves import (
    CLIP_RATIO,
    MEAN_OF_LAST,
    UNCLIPPED,
    Axis,
    Positions,
    clip_ratio,
    compared_run,
    concatenated,
    merged_metrics,
    metric_series,
    run_summary,
    scalar_series,
)
from collage_server.queries.finished import number, numbers
from collage_server.queries.layers import heatmap, histogram, worst_layers, worst_order
from collage_server.queries.runs import (
    WORST_LAYERS,
    alert_event,
    latest_answer,
    run_answer,
    state_at,
    state_of,
    with_health,
)

__all__ = [
    "Axis",
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
    "with_health",
    "worst_layers",
    "worst_order",
]
