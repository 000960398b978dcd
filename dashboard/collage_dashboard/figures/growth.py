"""What a live page lacks of a figure that it shows already: the newest columns of a heatmap, or points of curves.

The page keeps a description of what it shows, by which this module, without a memory of its own, tells whether the
new figure is the old one continued; `assets/figures.js` puts the part in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.io.json import to_json_plotly

from collage_dashboard.figures.style import digest

__all__ = ["Told", "answer_for", "as_sent", "newest_part"]

Told = dict[str, Any] | str
"""The description that a page keeps of a figure."""
_Part = dict[str, Any]
_CELLS: Final = ("z", "customdata")


def answer_for(figure: go.Figure, known: Told | None) -> tuple[Any, Told]:
    """What to send a page that shows the figure described by `known`, and the description of what it shows then.

    It is the whole figure, or {"newest": what it lacks}, as `assets/figures.js` takes it.
    """
    part, told = newest_part(figure, known)
    return as_sent(figure) if part is None else {"newest": part}, told


def newest_part(figure: go.Figure, known: Told | None) -> tuple[_Part | None, Told]:
    """What a page lacks of the figure if it shows the one described by `known`, and this one's description.

    None instead of the part if more has changed than that points or columns came: then the page needs it whole.
    The last point or column is always replaced: it may have been merged from fewer steps.
    """
    kinds = {trace.type for trace in figure.data}
    shown = known if isinstance(known, dict) else None
    if kinds == {"heatmap"}:
        return _newest_columns(figure, shown)
    if kinds == {"scatter"}:
        return _newest_points(figure, shown)
    return None, digest(figure)


def as_sent(figure: go.Figure) -> go.Figure | dict[str, Any]:
    """The whole figure for the browser: a heatmap's cells as lists, null where there is none.

    plotly's own way, of lists from the beginning, looks at each cell four times.
    """
    if {trace.type for trace in figure.data} != {"heatmap"}:
        return figure
    frame, held = _without_cells(figure)
    frame["data"][0] |= {"x": list(figure.data[0].x), **{name: _listed(rows) for name, rows in held.items()}}
    return frame


def _without_cells(figure: go.Figure) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """A heatmap's figure as plain values without columns, and its cells [rows, columns]."""
    trace = figure.data[0]
    held = {name: np.asarray(trace[name], dtype=np.float64) for name in _CELLS if trace[name] is not None}
    rest = {name: trace[name] for name in trace if name not in ("x", *_CELLS) and trace[name] is not None}
    frame = go.Figure(go.Heatmap(**rest), figure.layout).to_plotly_json()
    return frame, held


def _listed(rows: NDArray[np.float64]) -> list[list[float | None]]:
    cells = rows.astype(object)
    cells[np.isnan(rows)] = None
    found: list[list[float | None]] = cells.tolist()
    return found


def _newest_columns(figure: go.Figure, known: dict[str, Any] | None) -> tuple[_Part | None, Told]:
    frame, held = _without_cells(figure)
    places = list(figure.data[0].x)
    columns = len(places)
    told = {
        "frame": _hash([to_json_plotly(frame)]),
        "columns": columns,
        "settled": _hash(_columns(places, held, columns - 1)),
        "all": _hash(_columns(places, held, columns)),
    }
    if known is None or known["frame"] != told["frame"] or not 1 < known["columns"] <= columns:
        return None, told
    first = known["columns"] - 1
    if _hash(_columns(places, held, first)) != known["settled"]:
        return None, told
    cells = {name: _listed(rows[:, first:]) for name, rows in held.items()}
    return {"from": first, "x": places[first:], **cells}, told


def _columns(places: list[Any], held: Mapping[str, NDArray[np.float64]], columns: int) -> Iterator[str | bytes]:
    yield repr(places[:columns])
    for rows in held.values():
        yield np.ascontiguousarray(rows[:, :columns]).tobytes()


def _newest_points(figure: go.Figure, known: dict[str, Any] | None) -> tuple[_Part | None, Told]:
    frame = figure.to_plotly_json()
    traces = [_taken_out(trace) for trace in frame["data"]]
    ends = [_settled_ends(trace, arrays) for trace, arrays in zip(frame["data"], traces, strict=True)]
    told = {
        "frame": _hash([to_json_plotly(frame)]),
        "ends": ends,
        "settled": _hash(_kept(traces, ends)),
        "all": _hash(map(repr, traces)),
    }
    if known is None or known["frame"] != told["frame"] or len(known["ends"]) != len(ends):
        return None, told
    lengths = [len(arrays["x"]) for arrays in traces]
    if any(head + tail > length for (head, tail), length in zip(known["ends"], lengths, strict=True)):
        return None, told
    if _hash(_kept(traces, known["ends"])) != known["settled"]:
        return None, told
    between = [
        {name: values[head : len(values) - tail] for name, values in arrays.items()}
        for arrays, (head, tail) in zip(traces, known["ends"], strict=True)
    ]
    return {"ends": known["ends"], "traces": between}, told


def _taken_out(trace: dict[str, Any]) -> dict[str, list[Any]]:
    """What a trace has of each point; what is left of it is its frame."""
    found = {name: list(trace.pop(name)) for name in ("x", "y", "customdata") if trace.get(name) is not None}
    if isinstance(trace.get("marker", {}).get("size"), list | tuple):
        found["size"] = list(trace["marker"].pop("size"))
    return found


def _settled_ends(trace: Mapping[str, Any], arrays: Mapping[str, Sequence[Any]]) -> list[int]:
    """How many entries at the beginning and at the end stay as they are when points come.

    An interval's outline goes along one edge and back along the other: its newest stretch grows in the middle.
    """
    places = arrays["x"]
    if trace.get("fill") != "toself":
        return [max(len(places) - 1, 0), 0]
    begin = max((at + 1 for at, place in enumerate(places[:-1]) if place is None), default=0)
    points = (len(places) - begin - 2) // 2
    return [begin + points - 1, points + 1]


def _kept(traces: Sequence[Mapping[str, Sequence[Any]]], ends: Sequence[Sequence[int]]) -> Iterator[str]:
    for arrays, (head, tail) in zip(traces, ends, strict=True):
        for name, values in arrays.items():
            yield repr((name, list(values[:head]), list(values[len(values) - tail :])))


def _hash(parts: Any) -> str:
    found = blake2b(digest_size=8)
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()
