"""Tables on pages: of text and numbers, in cards that scroll, and the grids that sort.

`components.py` has the other pieces of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import html

from collage_dashboard.components import card

__all__ = [
    "Cell",
    "Column",
    "cell_content",
    "column_cells",
    "column_heads",
    "grid",
    "scrollable",
    "table",
    "wide_table",
]

Cell = tuple[str, str]
"""A value, and a smaller line; "" for none."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, its help, and the cell of a run or a strategy."""

    title: str
    help: str
    cell: Callable[[Any], Cell]


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]], texts: Sequence[int] = (), **more: Any) -> dmc.Table:
    """A table; `heads` may be empty. The first column and those at `texts` hold text, the others numbers."""

    def line(kind: Any, cells: Sequence[Any]) -> dmc.TableTr:
        return dmc.TableTr(
            [kind(cell, className="text" if at in (0, *texts) else "") for at, cell in enumerate(cells)]
        )

    head = [dmc.TableThead(line(dmc.TableTh, heads))] if heads else []
    body = dmc.TableTbody([line(dmc.TableTd, row) for row in rows])
    return dmc.Table([*head, body], **{"verticalSpacing": 4, **more})


def wide_table(
    heads: Any, rows: Any, label: str, note: str, *, texts: Sequence[int] = (), title: Any = ""
) -> dmc.Paper:
    """A card of a table of many numbers."""
    shown = table(heads, rows, texts, highlightOnHover=True, verticalSpacing="xs", horizontalSpacing=8)
    about = html.Details([html.Summary("About these numbers"), html.P(note)], className="folded")
    return card(title, scrollable([shown], label), about, kind="comparison-table", mt=10)


def column_heads(columns: Sequence[Column]) -> list[Any]:
    """The heads of these columns, with their help."""
    return [html.Span(column.title, title=column.help) for column in columns]


def column_cells(columns: Sequence[Column], shown: Any) -> list[Any]:
    """What these columns say of a run or a strategy."""
    return [cell_content(column.cell(shown)) for column in columns]


def cell_content(cell: Cell) -> list[Any]:
    """A cell of a table: its value, and a detail in small print if there is one."""
    value, detail = cell
    return [value, html.Span(detail, className="detail")] if detail else [value]


def scrollable(children: list[Any], label: str) -> html.Div:
    """A wide table that scrolls inside its card, by keyboard, too."""
    named: dict[str, Any] = {"aria-label": label}
    return html.Div(children, className="scrollable", tabIndex="0", role="region", **named)


def grid(
    identifier: Any, columns: Any, row_id: str, column: Mapping[str, Any], options: Mapping[str, Any], **more: Any
) -> dag.AgGrid:
    """A table that sorts. `column`: what all of its columns have; `options`: the grid's own."""
    usual = {"sortable": True, "resizable": True, "suppressHeaderMenuButton": True}
    return dag.AgGrid(
        id=identifier,
        columnDefs=columns,
        getRowId=f"params.data.{row_id}",
        defaultColDef={**usual, "suppressHeaderFilterButton": True, **column},
        dashGridOptions={"tooltipShowDelay": 300, "animateRows": False, **options},
        **more,
    )
