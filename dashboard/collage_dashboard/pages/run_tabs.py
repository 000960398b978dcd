"""What stands behind each tab of the run page: cards with empty figures, each named by its kind and metric."""

from __future__ import annotations

from typing import Any, Final

from dash import html

from collage_dashboard.components import chart_card, chart_note
from collage_dashboard.descriptions import STATE
from collage_dashboard.figures.histogram import PREDICTS
from collage_dashboard.pages.run_parts import about
from collage_dashboard.view import Tab, View
from collage_monitor import wire
from collage_monitor.metrics import METRICS, split_key

__all__ = ["DEFAULT_METRIC", "SERIES", "TABS", "layer_metrics", "panel"]

DEFAULT_METRIC: Final = "edq_ratio"
TABS: Final[dict[Tab, str]] = {
    "layers": "Layers",
    "curves": "Curves",
    "norms": "Norms",
    "states": "States",
    "classes": "Elements",
    "oracle": "Oracle",
    "about": "About",
}
SERIES: Final[dict[Tab, tuple[str, ...]]] = {
    "curves": ("loss", "validation_loss", "edq_ratio", "lost_update_ratio", "edq_visible_ratio", "half_ulp_margin"),
    "norms": ("grad_norm", "param_norm", "intended_norm", "effective_norm", "update_to_weight_ratio"),
    "oracle": (
        "edq_oracle_ratio",
        "oracle_displacement_ratio",
        "oracle_step_norm_ratio",
        "oracle_drift_ratio",
    ),
}
"""The curves of each tab that has a fixed list of them."""
_NOT_MAPPED: Final = frozenset({"elements", "sampled", "oracle_steps", "edq"})


def panel(view: View, run: wire.Run) -> Any:
    """The content of the view's tab."""
    if view.tab == "about":
        return about(run)
    if view.tab == "layers":
        return html.Div(_layers(view, run), className="charts")
    if view.tab == "classes":
        note = "Lost: intended, and rounded away. Idle: nothing was intended. Distorted: off by more than half."
        return html.Div(_card("classes", "lost", title="What became of each element", note=note, wide=True))
    keys = SERIES.get(view.tab) or tuple(sorted(key for key in run.latest if split_key(key)[0] == STATE))
    if not keys:
        return html.P("The optimizer's states were not measured.", className="crumbs")
    return html.Div([_card("series", key, strategy=_strategy(run)) for key in keys], className="charts")


def layer_metrics(run: wire.Run) -> list[str]:
    """Metrics that a heatmap of this run can show."""
    known = [key for key in run.latest if split_key(key)[0] in METRICS and key not in _NOT_MAPPED]
    return known or [DEFAULT_METRIC]


def _layers(view: View, run: wire.Run) -> list[Any]:
    metric = view.metric or DEFAULT_METRIC
    strategy = _strategy(run)
    hint = "Click a cell to see its layer at that step below."
    return [
        _card("heatmap", metric, strategy=strategy, wide=True, note=hint),
        _card("series", metric, strategy=strategy),
        _card(
            "histogram",
            "predicted_plain_lost_ratio",
            title="Update size against the grid",
            note=PREDICTS,
        ),
    ]


def _card(
    kind: str, metric: str, *, strategy: str | None = None, title: str = "", note: str = "", wide: bool = False
) -> html.Div:
    notes = " ".join(filter(None, (note, chart_note(metric, [strategy]) if kind != "heatmap" else "")))
    identifier = {"type": "run-figure", "kind": kind, "metric": metric}
    return html.Div(chart_card(metric, identifier, title=title, note=notes), className="wide" if wide else "")


def _strategy(run: wire.Run) -> str | None:
    return (run.watch.strategy or run.watch.observed_strategy) if run.watch else None
