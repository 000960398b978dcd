"""The runs table: every run with its newest numbers; pick some and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import dash
import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html, no_update

from collage_dashboard.components import limits_note, notice, problem_page
from collage_dashboard.descriptions import describe, share_of_runs, state_key
from collage_dashboard.identities import strategy_title
from collage_dashboard.reader import Problem, Reader, explain
from collage_dashboard.view import MAXIMUM_RUNS, View, read_address, write_address
from collage_monitor import wire
from collage_monitor.errors import CollageError

__all__ = ["columns", "compare_link", "grid_style", "layout", "register", "rows"]

LIMIT: Final = 1000
"""Newest runs that the table holds; older ones are found by searching."""
LIVE_MILLISECONDS: Final = 4000
IDLE_MILLISECONDS: Final = 30_000
_WIDTHS: Final = {"step": 80, "state_decrement": 118, "lost_update_ratio": 100, "validation_loss": 108}
ROW_PIXELS: Final = 42
HEADER_PIXELS: Final = 48
_FOUR_DIGITS: Final = {"function": "fourDigits(params.value)"}
_NO_RUNS: Final = Problem(
    "No runs yet",
    "Train the demo's five runs, or attach the agent to a training of your own: "
    "collage_agent.init() and collage_agent.watch(model, optimizer).",
    "make demo",
)


def layout(view: View, reader: Reader) -> html.Div:
    """The page's frame; its rows come with the first refresh.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    reader.ask(lambda client: client.runs(limit=1))
    return html.Div(
        [
            dcc.Location(id="runs-address", refresh=False, search=write_address(view)[1]),
            dcc.Interval(id="runs-tick", interval=LIVE_MILLISECONDS),
            html.Div(
                [
                    dmc.Title("Runs", order=2),
                    dmc.Text("", id="runs-count", c="dimmed", size="sm"),
                    html.Div(className="spring"),
                    dmc.TextInput(
                        id="runs-query",
                        value=view.query,
                        placeholder="Search names and ids",
                        debounce=400,
                        w=260,
                        **{"aria-label": "Search names and ids"},
                    ),
                    html.Div(compare_link([]), id="runs-compare"),
                ],
                className="toolbar",
            ),
            html.Div(id="runs-alert"),
            html.Div(_grid(), id="runs-table"),
            html.Div(problem_page(_NO_RUNS), id="runs-empty", style={"display": "none"}),
            limits_note(),
        ]
    )


def columns() -> list[dict[str, Any]]:
    """The table's columns; what they mean stands in their header's tooltip."""
    text: dict[str, Any] = {"filter": "agTextColumnFilter"}
    return [
        {"field": "name", "headerName": "Run", "cellRenderer": "RunLink", "minWidth": 140, "flex": 2, **text},
        {"field": "project", "headerName": "Project", "width": 90, **text},
        {
            "field": "strategy",
            "headerName": "Strategy",
            "width": 170,
            "tooltipField": "strategy_help",
            "cellClassRules": {"disputed": "params.data.disputed"},
            **text,
        },
        {"field": "dtype", "headerName": "Dtype", "width": 92},
        {"field": "state", "headerName": "State", "width": 88, "cellClass": "state-cell"},
        _number("step", "Step", "Newest step that was reported."),
        _number("edq_ratio", "EDQ"),
        _number("state_decrement", "State decrement", describe("state_decrement_ratio/exp_avg_sq").help),
        _number("lost_update_ratio", "Lost"),
        _number("loss", "Loss"),
        _number("validation_loss", "Validation loss"),
        {
            "field": "updated_at",
            "headerName": "Updated (UTC)",
            "width": 162,
            "sort": "desc",
            "valueFormatter": {"function": "minuteUtc(params.value)"},
        },
    ]


def rows(runs: Sequence[wire.Run]) -> list[dict[str, Any]]:
    """A row a run; numbers stay numbers so that they sort, undefined is None."""
    return [_row(run) for run in runs]


def grid_style(count: int) -> dict[str, str]:
    """As high as its rows, up to the window; beyond, rows scroll and only the visible ones exist."""
    wanted = HEADER_PIXELS + ROW_PIXELS * max(count, 3) + 4
    return {"height": f"min({wanted}px, calc(100vh - 210px))", "minHeight": "180px"}


def compare_link(run_ids: Sequence[str]) -> Any:
    """The way to the comparison of the picked runs."""
    count = len(run_ids)
    if count < 1:
        return dmc.Button("Pick runs to compare", disabled=True, variant="light", id="compare-button")
    text = "Compare 1 run" if count == 1 else f"Compare {min(count, MAXIMUM_RUNS)} runs"
    pathname, search = write_address(View(page="compare", runs=tuple(run_ids[:MAXIMUM_RUNS])))
    return dcc.Link(dmc.Button(text, id="compare-button"), href=pathname + search)


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind search, refresh and selection to the application."""

    @app.callback(
        Output("runs-grid", "rowData"),
        Output("runs-grid", "style"),
        Output("runs-count", "children"),
        Output("runs-alert", "children"),
        Output("runs-table", "style"),
        Output("runs-empty", "style"),
        Output("runs-tick", "interval"),
        Input("runs-address", "search"),
        Input("runs-tick", "n_intervals"),
    )
    def refresh(search: str | None, _ticks: int | None) -> tuple[Any, ...]:
        query = read_address("/", search).query
        try:
            page = reader.ask(lambda client: client.runs(q=query or None, limit=LIMIT))
        except CollageError as error:
            return (*[no_update] * 3, notice(explain(error)), no_update, no_update, LIVE_MILLISECONDS)
        empty = not page.runs and not query
        live = any(run.state == "running" for run in page.runs) or empty
        count = share_of_runs(len(page.runs), len(page.runs)) + (
            ", more are found by searching" if page.cursor else ""
        )
        shown, hidden = {"display": "block"}, {"display": "none"}
        return (
            rows(page.runs),
            grid_style(len(page.runs)),
            count,
            None,
            hidden if empty else shown,
            shown if empty else hidden,
            LIVE_MILLISECONDS if live else IDLE_MILLISECONDS,
        )

    @app.callback(
        Output("runs-address", "search"),
        Input("runs-query", "value"),
        State("runs-address", "search"),
        prevent_initial_call=True,
    )
    def search_for(query: str | None, search: str | None) -> Any:
        wanted = write_address(View(query=(query or "").strip()))[1]
        return no_update if wanted == (search or "") else wanted

    @app.callback(Output("runs-compare", "children"), Input("runs-grid", "selectedRows"), prevent_initial_call=True)
    def select(selected: list[dict[str, Any]] | None) -> Any:
        return compare_link([row["run_id"] for row in selected or []])


def _row(run: wire.Run) -> dict[str, Any]:
    watch = run.watch
    declared, observed = (watch.strategy, watch.observed_strategy) if watch else (None, "unknown")
    disputed = bool(declared) and observed not in {"unknown", declared}
    title = strategy_title(declared or observed)
    return {
        "run_id": run.run_id,
        "address": write_address(View(page="run", runs=(run.run_id,)))[0],
        "name": run.name,
        "project": run.project,
        "strategy": f"{title} (observed: {strategy_title(observed)})" if disputed else title,
        "strategy_help": f"declared: {declared or 'nothing'}, observed: {observed}",
        "disputed": disputed,
        "dtype": watch.dtype if watch else None,
        "state": run.state,
        "step": run.last_step,
        "edq_ratio": run.latest.get("edq_ratio"),
        "state_decrement": run.latest.get(state_key(run.latest)),
        "lost_update_ratio": run.latest.get("lost_update_ratio"),
        **{name: entry.value for name in ("loss", "validation_loss") if (entry := run.scalars.get(name))},
        "updated_at": run.updated_at,
    }


def _number(field: str, header: str, help_line: str = "") -> dict[str, Any]:
    return {
        "field": field,
        "headerName": header,
        "headerTooltip": help_line or describe(field).help,
        "type": "rightAligned",
        "width": _WIDTHS.get(field, 92),
        "wrapHeaderText": True,
        "valueFormatter": {"function": "wholeNumber(params.value)"} if field == "step" else _FOUR_DIGITS,
    }


def _grid() -> dag.AgGrid:
    return dag.AgGrid(
        id="runs-grid",
        columnDefs=columns(),
        rowData=[],
        getRowId="params.data.run_id",
        defaultColDef={
            "sortable": True,
            "resizable": True,
            "suppressHeaderMenuButton": True,
            "suppressHeaderFilterButton": True,
        },
        dashGridOptions={
            "rowSelection": {"mode": "multiRow", "checkboxes": True, "headerCheckbox": True},
            "rowHeight": ROW_PIXELS,
            "headerHeight": HEADER_PIXELS,
            "tooltipShowDelay": 300,
            "animateRows": False,
            "suppressCellFocus": True,
        },
        className="runs-grid",
        style=grid_style(3),
    )
