"""The zoom of a page's charts: the view holds it for all of them, and the zoomed part is read again.

Pages with charts call these between the view and `figures/`; the number of points is what the server is asked for.
"""

from __future__ import annotations

from typing import Final

import plotly.graph_objects as go

from collage_dashboard.server_reader import Reader
from collage_dashboard.view import View
from collage_monitor.diagnosis import finite
from collage_monitor.errors import ServerRefusal

__all__ = ["POINTS", "Steps", "step_at", "steps_within", "with_zoom"]

POINTS: Final = 300
"""Of a curve: as many as half a screen shows."""
Steps = tuple[int | None, int | None]
"""First and last step to read; None: as far as there are any."""


def with_zoom(figure: go.Figure, view: View, zoom_count: int = 0) -> go.Figure:
    """The x axis from one end of the view's zoom to the other, or whole.

    zoom_count: how often the page's zoom has changed. The count makes each zoom's figure differ. Otherwise, if the
    reader goes back before a zoom is answered, the browser would keep a stale chart.
    """
    if view.zoom is None:
        return figure.update_xaxes(uirevision=f"whole {zoom_count}")
    return figure.update_xaxes(range=list(view.zoom), uirevision=f"{view.zoom} {zoom_count}")


def steps_within(view: View, reader: Reader) -> Steps:
    """The steps of the view's run that its zoom shows; over tokens or time one more on each side.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    if view.zoom is None:
        return None, None
    first, last = view.zoom
    if view.axis == "step":
        return int(first), int(last)
    places = _places(view, reader)
    before = [step for at, step in places if at <= first]
    after = [step for at, step in places if at >= last]
    return max(before, default=None), min(after, default=None)


def step_at(place: float, view: View, reader: Reader) -> int | None:
    """The measured step nearest to a place on the view's axis; on that of steps, the step itself.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    if view.axis == "step":
        return int(place)
    return min(((abs(at - place), step) for at, step in _places(view, reader)), default=(0.0, None))[1]


def _places(view: View, reader: Reader) -> list[tuple[float, int]]:
    """Where the measured steps stand on the view's axis."""
    try:
        answer = reader.ask(lambda client: client.series(view.runs[0], "edq_ratio", axis=view.axis, points=POINTS))
    except ServerRefusal:
        return []
    places = zip(map(finite, answer.positions), answer.steps, strict=True)
    return [(at, step) for at, step in places if at is not None]
