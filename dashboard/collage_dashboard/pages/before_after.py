"""What changed: steps before and after a change, or a step that a reader picks, as a table of what differs.

An incident divides its steps itself; on a run's page the reader does, by a click on a curve, by a step or a range
that is typed, or by a link that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import Input, html

from collage_dashboard.components import card, labelled, shown_if
from collage_dashboard.descriptions import describe
from collage_dashboard.incident_evidence import COMPARED_METRICS, read_before_after
from collage_dashboard.navigation import clears, clientside, register_part
from collage_dashboard.server_reader import Reader
from collage_dashboard.tables import scrollable, table
from collage_dashboard.view import View, write_steps
from collage_monitor import wire
from collage_monitor.diagnosis.causes import Span
from collage_monitor.errors import NotAuthorised, ServerRefusal
from collage_monitor.metrics import METRICS, split_key
from collage_monitor.number_text import UNDEFINED, number, value_text

__all__ = [
    "CHANGED_BY",
    "before_after_card",
    "change_controls",
    "picked_change",
    "picked_marks",
    "register_change",
]

_ALWAYS: Final = ("learning_rate", "grad_norm", "param_norm", "half_ulp_margin", "clip_ratio")
"""Rows of the table that say so where they were not reported; others are left out then."""
_GROWING: Final = frozenset({"tokens", "oracle_steps"})
"""Counts that grow at every step: that they did says nothing."""
_SMALLEST_SHARE: Final = 1e-4
"""A change of a share below this is told by no digit of it."""
CHANGED_BY: Final = ("at",)
"""Fields of the view that the card of what changed depends on."""
Line = tuple[str, str, str, str]
"""What it is, before, after, and what it became, "" where that is hardly different."""


def before_after_card(
    before: Span | None, after: Span | None, note: str, *, title: str = "Before and after", aside: Any = None
) -> dmc.Paper:
    """The rows that changed by more than a tenth, the others folded; `note` says how the steps were divided.

    `aside` stands beside the title.
    """
    heads = ("", f"Before{_over(before)}", f"After{_over(after)}", "Change")
    lines = [*_values(before, after), *_ranks(before, after)]
    changed, alike = ([_cells(line) for line in lines if bool(line[-1]) is said] for said in (True, False))
    shown: list[Any] = [html.P("No reported value changed by more than 10 %.", className="quiet pad")]
    if changed:
        shown = [table(heads, changed)]
    if alike:
        summary = html.Summary(f"{len(alike)} that hardly changed")
        shown.append(html.Details([summary, table(heads, alike)], className="folded"))
    parts = [*([aside] if aside is not None else []), scrollable(shown, title)]
    note = f"{note} Metrics merged, logged values averaged."
    return card(title, *parts, kind="comparison-table", note=note)


def _over(span: Span | None) -> str:
    if span is None:
        return ": no step"
    if span.first_step == span.last_step:
        return f", step {span.first_step:,}"
    return f", steps {span.first_step:,} to {span.last_step:,}"


def _values(before: Span | None, after: Span | None) -> list[Line]:
    reported = {**(before.values if before else {}), **(after.values if after else {})}
    rows: list[Line] = []
    for name in COMPARED_METRICS:
        keys = [key for key in reported if split_key(key)[0] == name] if name in METRICS else [name]
        for key in keys or [name]:
            old, new = (span.values.get(key) if span else None for span in (before, after))
            if old is not None or new is not None:
                change = "" if key in _GROWING else _difference(old, new, key=key)
                rows.append((describe(key).title, value_text(key, old), value_text(key, new), change))
            elif key in _ALWAYS:
                rows.append((describe(key).title, "not reported", "not reported", ""))
    return rows


def _ranks(before: Span | None, after: Span | None) -> list[Line]:
    """Attempts and ranks."""
    spans = (before, after)
    attempts = [span.attempt if span else None for span in spans]
    ranks = [_of(span.ranks, span.world_size) if span else UNDEFINED for span in spans]
    fewer = None not in spans and ranks[0] != ranks[1]
    shown = [UNDEFINED if value is None else str(value) for value in attempts]
    return [
        ("Attempts begun", shown[0], shown[1], _difference(*attempts)),
        ("Ranks that reported", ranks[0], ranks[1], "changed" if fewer else ""),
    ]


def _of(ranks: int | None, world: int | None) -> str:
    if ranks is None:
        return "not reported"
    return f"{ranks} of {world}" if world else str(ranks)


def _cells(line: Line) -> Sequence[Any]:
    *cells, change = line
    return *cells, html.Span(change, className="changed" if change else "")


def _difference(before: wire.Number | None, after: wire.Number | None, *, key: str = "elements") -> str:
    """What a value became, where it changed by more than a tenth; nothing where it is hardly different."""
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return ""
    if describe(key).unit == "share" and abs(after - before) < _SMALLEST_SHARE:
        return ""
    if not (math.isfinite(before) and math.isfinite(after)) or abs(after - before) <= 0.1 * abs(before):
        return ""
    if before > 0 and after > 0 and not isinstance(before, int):
        return f"× {number(after / before, 3)}"
    return f"{'+' if after > before else '−'} {value_text(key, abs(after - before), 3)}"


def change_controls(view: View) -> list[Any]:
    """The field for a step or a range, and the button for the steps that a zoom shows, while there is one."""
    field = dmc.TextInput(
        id="run-at",
        value=write_steps(view.at) if view.at else "",
        placeholder="800, or 800-900",
        debounce=True,
        size="xs",
        w=150,
        **{"aria-label": "What changed at this step, or in this range of steps"},
    )
    shown = dmc.Button("What changed in the steps shown", id="run-at-shown", size="xs", variant="default")
    return [labelled("What changed at step", field), html.Div(shown, id="run-at-zoom", style=shown_if(view.zoom))]


def picked_marks(view: View) -> list[tuple[int, str]]:
    """What is picked, as the curves and the heatmap mark it: the step of a cell, and those asked about."""
    marks = [] if view.step is None else [(view.step, "since here")]
    if view.at is None:
        return marks
    first, last = view.at
    return [*marks, *([(first, "picked")] if first == last else [(first, "picked, from"), (last, "picked, to")])]


def register_change(app: dash.Dash, reader: Reader) -> None:
    """Bind the table of what changed at the picked step to the application."""
    register_part(app, reader, "run-change", "run-revision", CHANGED_BY, _asked_change)

    clientside(app, "flow.showChange", Input("run-change", "children"))


def _asked_change(view: View, reader: Reader, _now: Any) -> Any:
    if view.at is None:
        return None
    return picked_change(view, reader.ask(lambda client: client.run(view.runs[0])), reader)


def picked_change(view: View, run: wire.Run, reader: Reader) -> Any:
    """What changed at the view's step or range, or why the server does not say; None where none is picked.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    picked = view.at
    if picked is None:
        return None
    try:
        before, after = reader.ask(lambda client: read_before_after(client, run, picked))
    except NotAuthorised:
        raise
    except ServerRefusal as error:
        return html.P(str(error), className="quiet")
    first, last = picked
    where = f"at step {first:,}" if first == last else f"in steps {first:,} to {last:,}"
    note = "Divided at the step that was picked." if first == last else "The picked steps, and as many before them."
    close = clears("Close", "run", "at", className="textual card-close")
    return before_after_card(before, after, note, title=f"What changed {where}", aside=close)
