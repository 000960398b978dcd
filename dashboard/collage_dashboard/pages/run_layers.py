"""The layers of a run: the heatmap's choices, a table of all beside it, and a card of the one that is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import dash
import dash_mantine_components as dmc
import numpy as np
from dash import ALL, MATCH, Input, Output, State, dcc, html

from collage_dashboard.components import card, help_text, select, shown_if
from collage_dashboard.descriptions import describe, interval, metric_choices
from collage_dashboard.figures.style import digest
from collage_dashboard.navigation import clientside, or_later, register_part
from collage_dashboard.server_reader import Reader
from collage_dashboard.tables import grid
from collage_dashboard.view import View
from collage_monitor import wire
from collage_monitor.diagnosis import LOST_TOLERANCE, Track, finite, since_beyond
from collage_monitor.errors import NotAuthorised, ServerRefusal
from collage_monitor.metrics import METRICS, STATE_RATIOS, split_key
from collage_monitor.number_text import count, share_text, value_text

__all__ = [
    "DEFAULT_METRIC",
    "layer_card",
    "layer_metrics",
    "keys_of_layers",
    "layer_rows",
    "layer_table",
    "logs_only",
    "map_control",
    "map_style",
    "register_layers",
    "run_of",
]

DEFAULT_METRIC: Final = "lost_update_ratio"

_SHOWN: Final = (
    "edq_ratio",
    "edq_window_ratio",
    "lost_update_ratio",
    "lost_window_ratio",
    "edq_visible_ratio",
    "cast_changed_ratio",
    "cast_recoded_ratio",
    "cast_route_ratio",
    "half_ulp_margin",
    "param_norm",
    "update_to_weight_ratio",
    "decay_ratio",
    *STATE_RATIOS,
    "state_zero_ratio",
    "residual_fill_ratio",
    "residual_zero_ratio",
    "residual_dropped_ratio",
    "edq_oracle_ratio",
)
"""The numbers of a layer, in order: updates, scale of the weight, states, residuals, oracle."""
_MOST: Final = 20
"""As many metrics as one question may ask for."""


def _layer_keys(run: wire.Run) -> list[str]:
    """The metrics of a layer that this run measures, at most as many as one request allows."""
    order = {name: place for place, name in enumerate(_SHOWN)}
    keys = [key for key in run.latest if split_key(key)[0] in order and split_key(key)[0] in METRICS]
    return sorted(keys, key=lambda key: (order[split_key(key)[0]], keys.index(key)))[:_MOST]


def layer_card(view: View, run: wire.Run, reader: Reader, first_step: int | None) -> Any:
    """The card of the chosen layer, its numbers at the chosen step or from `first_step` on; None without a layer.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    if view.layer is None:
        return None
    run_id, keys = run.run_id, _layer_keys(run)
    begin, end = (first_step, None) if view.step is None else (view.step, view.step)
    try:
        layers, *found = reader.ask_together(
            lambda client: client.layers(run_id).layers,
            *(
                [
                    lambda client: client.series(
                        run_id, keys, layer=view.layer, points=1, first_step=begin, last_step=end
                    )
                ]
                if keys
                else []
            ),
        )
    except NotAuthorised:
        raise
    except ServerRefusal:
        return None
    layer = next((known for known in layers if known.name == view.layer), None)
    if layer is None:
        return None
    series = [own for one in found for own in (one, *(one.more.values() if isinstance(one.more, dict) else ()))]
    return card(
        html.H2(layer.name, className="layer-name"),
        html.P(_facts(layer, layers, series), className="quiet layer-facts"),
        html.Div([_number(own) for own in series if own.values], className="layer-numbers"),
        mb=14,
        id="run-layer-card",
    )


def _facts(layer: wire.Layer, layers: Sequence[wire.Layer], series: Sequence[wire.Series]) -> str:
    """Shape, size, share of the model, type, ranks, and the steps that the numbers are over."""
    own = math.prod(layer.shape)
    whole = sum(math.prod(shape) for shape in {known.name: known.shape for known in layers}.values())
    facts = [" × ".join(map(str, layer.shape)) or "a single number", f"{count(own)} elements"]
    facts += [f"{share_text(own / whole)} of the model"] if whole else []
    facts += [layer.dtype, *([layer.module_type] if layer.module_type else [])]
    point = next((one for one in series if one.steps), None)
    if point is not None and point.ranks and point.expected_ranks:
        facts.append(f"reported by {point.ranks[-1]} of {point.expected_ranks[-1]} ranks")
    if point is not None:
        first, last = count(point.first_steps[0]), count(point.steps[-1])
        facts.append(f"at step {last}" if first == last else f"over steps {first} to {last}")
    return " · ".join(facts)


def _number(series: wire.Series) -> html.Div:
    description = describe(series.metric)
    named: dict[str, Any] = {"data-metric": series.metric}
    ends = (series.low[-1] if series.low else None, series.high[-1] if series.high else None)
    return html.Div(
        [
            help_text(description.title, description),
            html.Div(
                [
                    html.Span(value_text(series.metric, series.values[-1]), className="value"),
                    html.Span(interval(series.metric, *ends), className="detail"),
                ]
            ),
        ],
        className="layer-number",
        **named,
    )


_NOT_MAPPED: Final = frozenset({"elements", "sampled", "oracle_steps", "edq"})


def layer_metrics(run: wire.Run) -> list[str]:
    """Metrics that a heatmap of this run can show."""
    known = [key for key in run.latest if split_key(key)[0] in METRICS and key not in _NOT_MAPPED]
    return known or [DEFAULT_METRIC]


def map_control(view: View, run: wire.Run) -> Any:
    """The heatmap's metric, which is its title."""
    offered, chosen = metric_choices(layer_metrics(run)), view.metric or DEFAULT_METRIC
    return select("run-metric", "Heatmap of", offered, chosen, searchable=True, allowDeselect=False, w=220)


def map_style(view: View, run: wire.Run) -> dict[str, str]:
    """The choice of its metric stands where the heatmap does."""
    return shown_if(view.tab == "layers" and not logs_only(run))


def logs_only(run: wire.Run) -> bool:
    """Whether nothing but logged scalars is known of the run: it watches no optimizer."""
    return run.watch is None and not run.latest and bool(run.scalars)


_MOST_ROWS: Final = 1000
_COLUMNS: Final = 100
"""Columns of the heatmap in which it is looked since when a layer loses."""
_OF_A_LAYER: Final = ("edq_ratio", "lost_update_ratio", "intended_norm", "half_ulp_margin")
_LOST_BY = "The layer's share of the model's losses: its Σu² − Σue divided by the model's."
_NUMBERS: Final = (
    ("share", "Share of the loss", "ofShare", _LOST_BY),
    ("lost_update_ratio", "Lost", "ofShare", ""),
    ("since", "Since", "wholeNumber", f"The step from which it has lost more than {share_text(LOST_TOLERANCE)}."),
    ("half_ulp_margin", "Margin", "ofMargin", ""),
    ("edq_ratio", "EDQ", "ofRatio", ""),
)
"""The table's numbers: field, title, the function that writes them, and what they are if no catalogue says it."""


def layer_table(run: wire.Run) -> dmc.Paper:
    """The card of the table of all layers, those first that lose the most; its rows come when it is there."""
    text = {"filter": "agTextColumnFilter"}
    number = {"type": "rightAligned", "width": 82, "wrapHeaderText": True, "filter": "agNumberColumnFilter"}
    name = {"cellRenderer": "LayerCell", "tooltipField": "layer", "flex": 1, "minWidth": 150}
    columns: list[dict[str, Any]] = [
        {"field": "layer", "headerName": "Layer", **name, **text},
        {"field": "kind", "headerName": "Kind", "tooltipField": "kind", "width": 90, **text},
        *(
            {
                "field": field,
                "headerName": title,
                "headerTooltip": told or describe(field).help,
                "valueFormatter": {"function": f"{form}(params)"},
                **number,
            }
            for field, title, form, told in _NUMBERS
        ),
    ]
    shown = grid(
        {"type": "run-layers", "index": run.run_id},
        columns,
        "layer",
        {"floatingFilter": True, "suppressFloatingFilterButton": True},
        {"rowHeight": 30, "headerHeight": 40},
        className="runs-grid layers-grid",
        style={"height": "100%", "minHeight": "360px"},
    )
    note = html.Div(id={"type": "run-layers-note", "index": run.run_id}, className="quiet layer-facts")
    known = dcc.Store(id={"type": "run-layers-digest", "index": run.run_id})
    return card("Layers", note, html.Div(shown, className="layers-place"), known)


def keys_of_layers(run: wire.Run) -> list[str]:
    """The metrics of the table that this run measures."""
    return [key for key in _OF_A_LAYER if key in run.latest]


def layer_rows(reader: Reader, run_id: str, keys: Sequence[str], first_step: int | None) -> list[dict[str, Any]]:
    """A row a layer over the steps from `first_step` on, those first that lose the most; at most `_MOST_ROWS`.

    keys: those of `keys_of_layers`.

    Raises:
        CollageError: the server does not answer, or refuses.
    """
    if "edq_ratio" not in keys or "lost_update_ratio" not in keys:
        return []
    history, layers, *merged = reader.ask_together(
        lambda client: client.heatmap(run_id, "lost_update_ratio", points=_COLUMNS),
        lambda client: client.layers(run_id).layers,
        *(lambda client, key=key: client.heatmap(run_id, key, points=1, first_step=first_step) for key in keys),
    )
    values: dict[str, dict[str, float | None]] = {
        key: _by_layer(answer) for key, answer in zip(keys, merged, strict=True)
    }
    missing = {name: _missing(values, name) for name in values["edq_ratio"]}
    whole = sum(missing.values())
    order = sorted(missing, key=lambda name: -missing[name])[:_MOST_ROWS]
    begins = _since(history, set(order))
    kinds = {layer.name: layer.module_type for layer in layers}
    return [
        {
            "layer": name,
            "kind": kinds.get(name) or "–",
            "share": missing[name] / whole if whole else 0.0,
            "since": begins.get(name),
            **{key: values[key].get(name) for key in keys if key != "intended_norm"},
        }
        for name in order
    ]


def _by_layer(answer: wire.Heatmap) -> dict[str, float | None]:
    return {name: finite(own[-1]) if own else None for name, own in zip(answer.layers, answer.values, strict=True)}


def _missing(values: Mapping[str, Mapping[str, float | None]], name: str) -> float:
    """Σu² − Σue of a layer a measured step, where it loses any."""
    edq, norm = values["edq_ratio"].get(name), values.get("intended_norm", {}).get(name)
    return 0.0 if edq is None or norm is None else max(norm * norm * (1 - edq), 0.0)


def _since(answer: wire.Heatmap, wanted: set[str]) -> dict[str, int | None]:
    """By layer the step from which on its share lost is beyond the tolerance, to the last."""
    tracks = {
        name: Track(answer.first_steps, answer.steps, np.array([finite(value) for value in own], dtype=np.float64))
        for name, own in zip(answer.layers, answer.values, strict=True)
        if name in wanted
    }
    return {name: since_beyond(track, LOST_TOLERANCE, below=False) for name, track in tracks.items()}


def _chosen_layer(view: View, reader: Reader, judged: Mapping[str, Any]) -> Any:
    """The card of the view's layer."""
    if view.tab == "about" or view.layer is None:
        return None
    return layer_card(view, reader.ask(lambda client: client.run(view.runs[0])), reader, judged["first"])


def register_layers(app: dash.Dash, reader: Reader) -> None:
    """Bind the card of the chosen layer and the table's rows to the application."""
    register_part(app, reader, "run-layer-place", "run-judged", ("layer", "step", "tab"), _chosen_layer)

    @app.callback(
        Output({"type": "run-layers", "index": MATCH}, "rowData"),
        Output({"type": "run-layers-note", "index": MATCH}, "children"),
        Output({"type": "run-layers-digest", "index": MATCH}, "data"),
        Input("run-judged", "data"),
        State("run-layer-keys", "data"),
        State({"type": "run-layers-digest", "index": MATCH}, "data"),
    )
    def fill_table(judged: dict[str, Any], keys: list[str], known: str | None) -> Any:
        run_id = dash.ctx.outputs_list[0]["id"]["index"]
        if judged["failed"]:
            raise dash.exceptions.PreventUpdate
        with or_later():
            # The page may have been opened before the first measurement.
            keys = keys or keys_of_layers(reader.ask(lambda client: client.run(run_id)))
            rows = layer_rows(reader, run_id, keys, judged["first"])
        # The page tells a digest of its rows: the rows themselves would be most of what a live page sends.
        found = digest(rows)
        if found == known:
            raise dash.exceptions.PreventUpdate
        most = f" The {_MOST_ROWS:,} that lose the most." if len(rows) == _MOST_ROWS else ""
        ends = [judged[name] for name in ("first", "last")]
        over = "The whole run" if None in ends else f"Steps {ends[0]:,} to {ends[1]:,}"
        return rows, f"{over}.{most}", found

    clientside(app, "view.chooseLayer", Input({"type": "run-layers", "index": ALL}, "cellClicked"))
    clientside(app, "flow.showLayer", Input("run-layer-place", "children"))


def run_of(record: str) -> wire.Run:
    """The run that the page keeps."""
    return wire.decode_message(record.encode(), wire.Run, wire.JSON)
