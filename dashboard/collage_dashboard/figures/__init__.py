"""Figures: pure functions from answers of the server to Plotly figures, and of these to SVG. No query or state."""

from collage_dashboard.figures.heatmap import heatmap
from collage_dashboard.figures.histogram import class_shares, update_histogram
from collage_dashboard.figures.picture import picture
from collage_dashboard.figures.series import NamedCurve, curves
from collage_dashboard.figures.tradeoff import tradeoff

__all__ = ["NamedCurve", "class_shares", "curves", "heatmap", "picture", "tradeoff", "update_histogram"]
