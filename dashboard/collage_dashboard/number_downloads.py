"""The numbers behind a page: of a chart as CSV, all points that the server keeps, and of a page in pandas.

Pages place the buttons; the address holds the page's whole view, so a link gives the same numbers to anybody with
access (`tests/dashboard/test_number_downloads.py`).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from dash import html
from flask import Flask, Response, request, stream_with_context

from collage_dashboard.descriptions import describe
from collage_dashboard.server_reader import Reader, refusal_answer
from collage_dashboard.view import View, read_address
from collage_dashboard.zoom import Steps
from collage_monitor import wire
from collage_monitor.client import Axis, Client
from collage_monitor.errors import CollageError, NotAuthorised, ServerRefusal

__all__ = ["file_stem", "frame_of", "install_numbers", "numbers_address", "pandas_note"]

_MOST_POINTS: Final = 10_000
_MOST_OF_LAYERS: Final = 200
"""Points that one answer may have; more would be merged."""
_HEADS: Final = ("run", "run_id", "metric", "layer", "first_step", "step")
_VALUES: Final = ("value", "minimum", "maximum", "low", "high", "ranks", "expected_ranks")
_Answer = wire.Series | wire.Heatmap


def numbers_address(view: View, metrics: Sequence[str], steps: Steps, *, by_layer: bool = False) -> str:
    """The address of the numbers of these metrics of the view's runs and layer, between `steps`."""
    pairs: list[tuple[str, Any]] = [("run", run) for run in view.runs] + [("metric", key) for key in metrics]
    pairs += [("layer", view.layer)] if view.layer and not by_layer else []
    pairs += [("axis", view.axis)] if view.axis != "step" else []
    pairs += [("by", "layer")] if by_layer else []
    pairs += [(name, step) for name, step in zip(("from", "to"), steps, strict=True) if step is not None]
    return f"/numbers.csv?{urlencode(pairs)}"


def file_stem(names: Sequence[str], what: str = "") -> str:
    """A file's name, of letters, digits and dashes, whatever the runs are called."""
    text = names[0] if len(names) == 1 else f"comparison of {len(names)} runs"
    parts = [re.sub(r"[^a-z0-9]+", "-", part.lower())[:60].strip("-") for part in (text, what)]
    return "-".join(["collage", parts[0] or "run", *filter(None, parts[1:])])


def pandas_note(reader: Reader, question: str) -> html.Details:
    """How to get the numbers of a page into pandas; `question` is asked of `client`.

    Raises:
        CollageError: no way to the server can be made.
    """
    server_url = reader.ask(lambda client: client.server_url)
    code = (
        f'from collage_monitor.client import Client\n\nclient = Client("{server_url}", token)\nframe = {question}'
    )
    return html.Details([html.Summary("Export to pandas"), html.Pre(code, tabIndex="0")], className="pandas")


def frame_of(run_ids: Sequence[str] = (), filters: Mapping[str, str | None] = MappingProxyType({})) -> str:
    """The question for the curves of these runs, or of all that the filters leave."""
    named = [json.dumps(list(run_ids)) if len(run_ids) != 1 else json.dumps(run_ids[0])] if run_ids else []
    named += [f"{name}={json.dumps(value)}" for name, value in filters.items() if value]
    return f"client.frame({', '.join(named)}).to_pandas()"


def install_numbers(server: Flask, reader: Reader) -> None:
    """`/numbers.csv?run=…&metric=…`: a row a point, with the run's name in the file's and in each row."""

    @server.get("/numbers.csv")
    def send_numbers() -> Response:
        given = parse_qs(request.query_string.decode())
        view, metrics = read_address("/compare", request.query_string.decode()), tuple(given.get("metric", ()))
        try:
            runs = (
                reader.ask(lambda client: client.run_table(run_ids=view.runs, limit=500)).rows if view.runs else []
            )
        except CollageError as error:
            return refusal_answer(error)
        if not runs or not metrics:
            return Response("Name an existing run and a metric.\n", 404, mimetype="text/plain")
        first, last = (_whole_number(given.get(name, [""])[0]) for name in ("from", "to"))
        question = _Question(metrics, view.layer, view.axis, first, last, given.get("by") == ["layer"])
        answer = Response(stream_with_context(_lines(reader, runs, question)), mimetype="text/csv")
        what = describe(metrics[0]).title if len(metrics) == 1 else "curves"
        name = file_stem([run.name for run in runs], what + (" by layer" if question.by_layer else ""))
        answer.headers["Content-Disposition"] = f'attachment; filename="{name}.csv"'
        return answer


def _whole_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


@dataclass(frozen=True)
class _Question:
    metrics: tuple[str, ...]
    layer: str | None
    axis: Axis
    first_step: int | None
    last_step: int | None
    by_layer: bool


def _lines(reader: Reader, runs: Sequence[wire.RunRow], asked: _Question) -> Iterator[str]:
    places = [asked.axis] if asked.axis != "step" else []
    yield _line([*_HEADS, *places, *(_VALUES[:1] if asked.by_layer else _VALUES)])
    for run in runs:
        for metric in asked.metrics:
            yield from _of_run(reader, run, metric, asked)


def _of_run(reader: Reader, run: wire.RunRow, metric: str, asked: _Question) -> Iterator[str]:
    first, last = asked.first_step or 0, run.last_step or 0
    last = last if asked.last_step is None else min(asked.last_step, last)
    layer = None if describe(metric).scalar else asked.layer
    points = _MOST_OF_LAYERS if asked.by_layer else _MOST_POINTS

    def ask(client: Client, begin: int, end: int) -> _Answer:
        bounds: dict[str, Any] = {"points": points, "first_step": begin, "last_step": end, "axis": asked.axis}
        if asked.by_layer:
            return client.heatmap(run.run_id, metric, **bounds)
        return client.series(run.run_id, metric, layer=layer, **bounds)

    for part in _whole(reader, ask, first, last, points):
        if isinstance(part, wire.Heatmap):
            of_layers = [(name, [values]) for name, values in zip(part.layers, part.values, strict=True)]
        else:
            more = (part.low, part.high, part.ranks, part.expected_ranks)
            columns: list[Any] = [part.values, part.minimum, part.maximum]
            of_layers = [(layer or "", columns + [column or [None] * len(part.steps) for column in more])]
        for name, shown in of_layers:
            yield from _rows([run.name, run.run_id, metric, name], asked.axis, part, shown)


def _whole(
    reader: Reader, ask: Callable[[Client, int, int], _Answer], first: int, last: int, most: int
) -> Iterator[_Answer]:
    """The answer in parts so small that the server merges no points; without refused parts."""
    try:
        answer = reader.ask(lambda client: ask(client, first, last))
    except NotAuthorised:
        raise
    except ServerRefusal:
        return
    if last - first < most or answer.first_steps == answer.steps:
        yield answer
        return
    middle = (first + last) // 2
    yield from _whole(reader, ask, first, middle, most)
    yield from _whole(reader, ask, middle + 1, last, most)


def _rows(named: Sequence[str], axis: Axis, answer: _Answer, columns: Sequence[Sequence[Any]]) -> Iterator[str]:
    placed = [answer.positions] if axis != "step" else []
    for row in zip(answer.first_steps, answer.steps, *placed, *columns, strict=True):
        yield _line([*map(_text, named), *("" if cell is None else cell for cell in row)])


def _text(name: str) -> str:
    """Names come from users, so a name that a spreadsheet would read as a formula is escaped as text."""
    return f"'{name}" if re.match(r"[=+\-@\t\r]", name) else name


def _line(cells: Sequence[Any]) -> str:
    written = StringIO()
    csv.writer(written, lineterminator="\n").writerow(cells)
    return written.getvalue()
