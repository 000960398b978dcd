"""What the table of runs shows: its columns, a row a run or a group of runs, and the words above.

The functions that columns name lie in `assets/dashAgGridFunctions.js`, what draws their cells in
`assets/dashAgGridComponentFunctions.js`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import dash_mantine_components as dmc
from dash import dcc, html

from collage_dashboard.components import judgement_mark, text_of_tags
from collage_dashboard.descriptions import describe, in_few_words, short_name, state_key
from collage_dashboard.figures.style import strategy_colour
from collage_dashboard.run_styles import strategy_title
from collage_dashboard.view import View, comparison_of, run_address, write_address
from collage_monitor import wire
from collage_monitor.diagnosis import NO_PROBLEM, finite

__all__ = [
    "USUAL",
    "beside",
    "columns",
    "compare_link",
    "damaged_rows",
    "group_rows",
    "headline_of",
    "rows",
    "sick_in",
]

USUAL: Final = tuple(column.key for column in wire.RUN_COLUMNS[1:] if column.usual)
"""The columns after the name, unless a reader chooses others."""


def _recent(key: str) -> str:
    return f"{describe(key).help} Here over the run's recent past, which the judgement rests on."


_HOW_TO_EDIT: Final = "Double-click or press Enter to edit."
_WORDS: Final[dict[str, Any]] = {"width": 110}
_NUMBERS: Final = {
    "number": "fourDigitsOver(params)",
    "share": "ofShare(params)",
    "ratio": "ofRatio(params)",
    "bytes": "ofBytes(params)",
    "count": "wholeNumber(params)",
}
_OF_KIND: Final[dict[str, dict[str, Any]]] = {
    "word": _WORDS,
    "text": {**_WORDS, "editable": {"function": "params.data && !params.data.group"}},
    "curve": {"cellRenderer": "TrendCell", "wrapHeaderText": True, "width": 84},
    "time": {
        "valueFormatter": {"function": "minuteUtc(params.value)"},
        "wrapHeaderText": True,
        "cellClass": "wrapped",
        "width": 92,
    },
    **{
        kind: {
            "type": "rightAligned",
            "cellClass": ["ag-right-aligned-cell", "number-cell"],
            "tooltipValueGetter": {"function": "overRuns(params)"},
            "wrapHeaderText": True,
            "valueFormatter": {"function": form},
        }
        for kind, form in _NUMBERS.items()
    },
}
"""How the grid shows each kind of column: the functions are those of `assets/dashAgGridFunctions.js`."""
_OF_COLUMN: Final[dict[str, dict[str, Any]]] = {
    "name": {"cellRenderer": "RunCell", "minWidth": 200, "width": 250, "pinned": "left", "lockPosition": "left"},
    "health": {
        "cellRenderer": "JudgementCell",
        "minWidth": 196,
        "flex": 1,
        "headerTooltip": "What is wrong in the run's recent past; the full sentence is below the table.",
    },
    "strategy": {
        "width": 162,
        "cellClass": "wrapped",
        "cellClassRules": {"disputed": "params.data && params.data.disputed"},
    },
    "loss": {"width": 74, "headerTooltip": "The newest logged value."},
    "lost_update_ratio": {"width": 78, "headerTooltip": _recent("lost_update_ratio")},
    "edq_ratio": {"width": 64, "headerTooltip": _recent("edq_ratio")},
    "tokens_per_second": {"width": 74},
    "state": {"width": 76},
    "validation_loss": {"width": 88},
    "state_decrement_ratio": {"headerTooltip": _recent("state_decrement_ratio/exp_avg_sq")},
    "last_step": {"width": 64, "headerTooltip": "The newest reported step."},
    "tags": {
        "width": 150,
        "headerTooltip": "Tags, separated by commas; put a tag that contains a comma in quotes. " + _HOW_TO_EDIT,
    },
    "notes": {
        "width": 180,
        "cellEditor": "agLargeTextCellEditor",
        "cellEditorPopup": True,
        "headerTooltip": "Notes. " + _HOW_TO_EDIT,
    },
}
"""What a column has beside what its kind has."""


def columns(view: View) -> list[dict[str, Any]]:
    """The table's columns as the view has them; what they mean stands in their header's tooltip."""
    known = {column.key: column for column in wire.RUN_COLUMNS if column.usual}
    found = [
        _column(known[key]) if key in known else _of_configuration(key)
        for key in ("name", *(view.columns or USUAL))
    ]
    for column in found:
        if column.get("field") == view.sort.removeprefix("-"):
            column["sort"] = "desc" if view.sort.startswith("-") else "asc"
    return found


def _column(column: wire.RunColumn) -> dict[str, Any]:
    """A column as the grid has it."""
    key = column.key
    found = {"field": key, "headerName": column.title, "width": 92, "sortable": column.sorts}
    if column.kind in _NUMBERS:
        found["headerTooltip"] = describe(key).help
    found |= _OF_KIND[column.kind] | _OF_COLUMN.get(key, {})
    return (
        found if column.kind not in {"word", "text"} or "cellRenderer" in found else {**found, "tooltipField": key}
    )


def rows(table: Sequence[wire.RunRow]) -> list[dict[str, Any]]:
    """A row a run; numbers stay numbers so that they sort, undefined is None."""
    return [_row(run) for run in table]


def damaged_rows(damaged: Sequence[wire.DamagedRun]) -> list[dict[str, Any]]:
    """A row a run that the server cannot read: its id, and what is wrong with it in place of a judgement."""
    words = {"mark": judgement_mark("unknown"), "brief": "Damaged", "trend": []}
    return [
        {
            "run_id": own.run_id,
            "address": run_address(own.run_id),
            "name": own.run_id,
            "headline": own.message,
            **words,
        }
        for own in damaged
    ]


def beside(shown: Sequence[dict[str, Any]], baseline: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The rows, with how far their numbers are from those of the baseline's row."""
    if baseline is None:
        return list(shown)
    return [{**row, "versus": _differences(row, baseline)} for row in shown]


def _differences(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float]:
    if row["run_id"] == baseline["run_id"]:
        return {}
    numbers = [column.key for column in wire.RUN_COLUMNS if column.kind in _NUMBERS]
    pairs = {name: (finite(row.get(name)), finite(baseline.get(name))) for name in numbers}
    return {name: own - its for name, (own, its) in pairs.items() if own is not None and its is not None}


def headline_of(table: wire.RunTable) -> list[Any]:
    """'3 of 6 runs are sick. Worst: plain (loses 57.6 % of its updates). 2 live.' Worst and live are links."""
    live, sick, healthy = sum(table.live.values()), sick_in(table), table.healths.get("healthy", 0)
    runs = f"{table.total:,} {'run' if table.total == 1 else 'runs'}"
    # To another address of the page itself: a link of the application's would not be followed.
    told: list[Any] = [" ", html.A(f"{live:,} live", href="/runs?state=running"), "."] if live else []
    if table.worst is not None and sick:
        worst = dcc.Link(f"Worst: {table.worst.name}", href=run_address(table.worst.run_id))
        are = f"{sick:,} of {runs} {'is' if sick == 1 else 'are'} sick."
        return [f"{are} ", worst, f" ({table.worst.short}).", *told]
    if table.total and healthy == table.total:
        return [f"{'The run is' if table.total == 1 else f'All {runs} are'} healthy.", *told]
    return [f"No problem is known of {runs}, {healthy:,} of them healthy.", *told]


def sick_in(table: wire.RunTable) -> int:
    """How many of the runs have a problem."""
    return sum(count for health, count in table.healths.items() if health not in {"", *NO_PROBLEM})


def compare_link(picked: Mapping[str, str]) -> Any:
    """The way to the comparison of the picked runs, by id and name, and a way to let them go."""
    count = len(picked)
    if count < 1:
        return dmc.Button("Pick runs to compare", disabled=True, variant="light", id="compare-button")
    view = comparison_of(tuple(picked))
    shown = f"{len(view.runs)} of {count}" if view.left_out else str(count)
    text = f"Compare {shown} {'run' if count == 1 else 'runs'}"
    pathname, search = write_address(view)
    names = ", ".join(picked.values())
    link = dcc.Link(text, href=pathname + search, className="button", title=names)
    clear = dmc.Button("Clear", variant="subtle", size="compact-sm", **{"data-unpick": ""})
    return html.Div([link, clear], className="tray")


def _row(run: wire.RunRow) -> dict[str, Any]:
    observed = run.observed_strategy or "unknown"
    disputed = bool(run.strategy) and observed not in {"unknown", run.strategy}
    title = strategy_title(run.strategy or observed, run.dtype)
    numbers = run.overview.numbers if run.overview else {}
    return {
        "run_id": run.run_id,
        "address": run_address(run.run_id),
        "name": run.name,
        "label": short_name(run.name),
        "project": run.project,
        "strategy": f"{title} (observed: {strategy_title(observed)})" if disputed else title,
        "disputed": disputed,
        "colour": strategy_colour(run.strategy or observed, run.dtype),
        "state": run.state,
        "health": run.overview.health if run.overview else None,
        "mark": judgement_mark(run.overview.health if run.overview else "unknown"),
        "brief": in_few_words(run.overview),
        "headline": run.overview.headline if run.overview else "Not evaluated yet.",
        "trend": run.overview.trend if run.overview else [],
        "last_step": run.last_step,
        "tags": text_of_tags(run.tags),
        "notes": run.notes,
        "edq_ratio": numbers.get("edq_ratio"),
        "state_decrement_ratio": numbers.get(state_key(numbers)),
        "lost_update_ratio": numbers.get("lost_update_ratio"),
        **{column.key: entry.value for column in wire.RUN_COLUMNS if (entry := run.scalars.get(column.key))},
        "updated_at": run.updated_at,
        "config": run.config,
    }


def group_rows(entries: Sequence[wire.TableEntry], view: View) -> list[dict[str, Any]]:
    """A row a group, and after an open one a row a run of it."""
    found = []
    for entry in entries:
        if entry.group is not None:
            found.append(_group_row(entry.group, view))
        elif entry.run is not None:
            found.append({**_row(entry.run), "member": True})
    return found


def _group_row(group: wire.RunGroup, view: View) -> dict[str, Any]:
    is_open = group.key in view.opened
    others = tuple(key for key in view.opened if key != group.key)
    count, at_odds = group.count, group.healths.get(group.health, 0)
    of_these = f"{at_odds} of {count}: " if at_odds < count else ""
    of_all = f"{at_odds} of {count} runs: "
    title = strategy_title(group.strategy, group.dtype)
    # Last losses of other seeds, at other steps, do not compare strategies.
    left_out = ("loss", "validation_loss") if view.by == "strategy" else ()
    numbers = {name: over for name, over in group.numbers.items() if name not in left_out}
    return {
        "group": True,
        "run_id": group.key,
        "address": "".join(write_address(replace(view, opened=others if is_open else (*others, group.key)))),
        "open": is_open,
        "name": _group_name(group, view.by, title),
        "runs": f"{count} run" if count == 1 else f"{count:,} runs",
        "picks": group.runs,
        "project": group.project,
        "strategy": title,
        "colour": strategy_colour(group.strategy, group.dtype),
        "state": ", ".join(state if n == count else f"{n} {state}" for state, n in sorted(group.states.items())),
        "health": group.health,
        "mark": judgement_mark(group.health),
        "brief": f"{of_these}{group.health}" if of_these else group.health.capitalize(),
        "headline": group.headline if count == 1 else f"{of_all}{group.health}. The worst: {group.headline}",
        "last_step": group.last_step,
        "updated_at": group.updated_at,
        **{name: over.value for name, over in numbers.items()},
        "over": {name: [over.count, over.spread] for name, over in numbers.items()},
    }


def _group_name(group: wire.RunGroup, by: wire.GroupBy | None, title: str) -> str:
    if by == "strategy":
        return title
    if by == "group":
        return ", ".join(group.groups) or "No group"
    first = next(iter(group.runs.values()), "")
    return first if group.count == 1 else f"{first} and {group.count - 1:,} more"


def _of_configuration(path: str) -> dict[str, Any]:
    return {
        "colId": path,
        "headerName": path,
        "headerTooltip": f"{path}, of the run's configuration.",
        "valueGetter": {"function": "ofConfiguration(params)"},
        "tooltipValueGetter": {"function": "ofConfiguration(params)"},
        "width": 110,
        "wrapHeaderText": True,
        "sortable": False,
    }
