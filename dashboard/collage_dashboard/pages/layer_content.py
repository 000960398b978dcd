"""One layer of a run: what it is, its share of the model, and every number that is measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import dash_mantine_components as dmc
from dash import html

from collage_dashboard.components import help_text
from collage_dashboard.descriptions import count, describe, interval, number
from collage_dashboard.reader import Reader
from collage_dashboard.view import View
from collage_monitor import wire
from collage_monitor.errors import NotAuthorised, ServerRefusal
from collage_monitor.metrics import METRICS, split_key

__all__ = ["layer_card", "layer_keys"]

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
    "state_decrement_ratio",
    "state_zero_ratio",
    "residual_fill_ratio",
    "residual_zero_ratio",
    "residual_dropped_ratio",
    "edq_oracle_ratio",
)
"""The numbers of a layer, in order: updates, scale of the weight, states, residuals, oracle."""
_MOST: Final = 20
"""As many metrics as one question may ask for."""


def layer_keys(run: wire.Run) -> list[str]:
    """The metrics of a layer that this run measures, at most as many as one question takes."""
    order = {name: place for place, name in enumerate(_SHOWN)}
    keys = [key for key in run.latest if split_key(key)[0] in order and split_key(key)[0] in METRICS]
    return sorted(keys, key=lambda key: (order[split_key(key)[0]], keys.index(key)))[:_MOST]


def layer_card(view: View, run: wire.Run, reader: Reader, first_step: int | None) -> Any:
    """The card of the view's layer, its numbers at the view's step, else from `first_step` on; none for the model.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    if view.layer is None:
        return None
    run_id, keys = run.run_id, layer_keys(run)
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
    return dmc.Paper(
        [
            html.H2(layer.name, className="layer-name"),
            html.P(_facts(layer, layers, series), className="quiet layer-facts"),
            html.Div([_number(own) for own in series if own.values], className="layer-numbers"),
        ],
        className="card",
        withBorder=True,
        mb=14,
        id="run-layer-card",
    )


def _facts(layer: wire.Layer, layers: Sequence[wire.Layer], series: Sequence[wire.Series]) -> str:
    """Shape, size, share of the model, type, ranks, and the steps that the numbers are over."""
    own = math.prod(layer.shape)
    whole = sum(math.prod(shape) for shape in {known.name: known.shape for known in layers}.values())
    facts = [" × ".join(map(str, layer.shape)) or "a single number", f"{count(own)} elements"]
    facts += [f"{number(100 * own / whole, 3)} % of the model"] if whole else []
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
    bounds = interval(series.low[-1] if series.low else None, series.high[-1] if series.high else None)
    return html.Div(
        [
            help_text(description.title, description),
            html.Div(
                [html.Span(number(series.values[-1]), className="value"), html.Span(bounds, className="detail")]
            ),
        ],
        className="layer-number",
        **named,
    )
