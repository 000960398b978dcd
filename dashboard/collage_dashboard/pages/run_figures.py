"""From a figure's name to the figure: asks the server for exactly what one chart of the run page needs."""

from __future__ import annotations

import plotly.graph_objects as go

from collage_dashboard.descriptions import describe
from collage_dashboard.figures import Curve, class_shares, curves, heatmap, update_histogram
from collage_dashboard.figures.classes import CLASSES
from collage_dashboard.figures.palette import ACCENT
from collage_dashboard.figures.style import empty_figure
from collage_dashboard.reader import Reader
from collage_dashboard.view import View
from collage_monitor import wire
from collage_monitor.errors import NotAuthorised, ServerRefusal

__all__ = ["draw"]


def draw(kind: str, metric: str, view: View, reader: Reader) -> go.Figure:
    """The figure of `kind` ("series", "heatmap", "histogram", "classes") for `metric`.

    A metric that the server refuses is an empty figure with its reason.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    try:
        return _DRAWERS[kind](metric, view, reader)
    except NotAuthorised:
        raise
    except ServerRefusal as error:
        return empty_figure(str(error))


def _series(metric: str, view: View, reader: Reader) -> go.Figure:
    answer = _read_series(metric, view, reader)
    name = view.layer or "whole model"
    return curves(metric, [Curve(name, ACCENT, answer)], smoothing=view.smoothing)


def _heatmap(metric: str, view: View, reader: Reader) -> go.Figure:
    answer = reader.ask(lambda client: client.heatmap(view.runs[0], metric, order=view.order))
    return heatmap(answer, selected=view.layer)


def _histogram(_metric: str, view: View, reader: Reader) -> go.Figure:
    return update_histogram(
        reader.ask(lambda client: client.histogram(view.runs[0], layer=view.layer, step=view.step))
    )


def _classes(_metric: str, view: View, reader: Reader) -> go.Figure:
    return class_shares({name: _read_series(name, view, reader) for name in CLASSES})


def _read_series(metric: str, view: View, reader: Reader) -> wire.Series:
    layer = None if describe(metric).scalar else view.layer
    return reader.ask(lambda client: client.series(view.runs[0], metric, layer=layer, axis=view.axis, points=500))


_DRAWERS = {"series": _series, "heatmap": _heatmap, "histogram": _histogram, "classes": _classes}
