"""The pieces that pages are made of: cards, notices, badges, and controls that are set from the view.

Every page and the HTML report use them. A piece that only one page needs stays with that page.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from itertools import chain
from typing import Any, Final
from urllib.parse import urlencode

import dash_mantine_components as dmc
from dash import dcc, html
from flask import has_request_context, request

from collage_dashboard.descriptions import Description, describe, iso, when
from collage_dashboard.figures.style import GRAPH_CONFIG, empty_figure
from collage_dashboard.run_styles import LineStyle, is_stochastic
from collage_dashboard.server_reader import Problem
from collage_dashboard.view import View
from collage_monitor import wire
from collage_monitor.errors import CollageError, NotAuthorised

__all__ = [
    "IDLE_MILLISECONDS",
    "LIVE_MILLISECONDS",
    "badge",
    "card",
    "chart_card",
    "chart_note",
    "curve_controls",
    "curve_keys",
    "embed_note",
    "filter_select",
    "help_text",
    "judgement_mark",
    "judgement_sign",
    "labelled",
    "menu",
    "milliseconds_after",
    "moment",
    "notice",
    "over_steps",
    "page",
    "problem_page",
    "refresh_marker",
    "refresh_milliseconds",
    "refusal",
    "share_links",
    "shown_if",
    "run_label",
    "save_buttons",
    "segments",
    "select",
    "state_badge",
    "tags_of",
    "text_of_tags",
    "verdict_line",
]

_STATE_COLOURS: Final = {"running": "blue", "finished": "gray", "failed": "red", "stale": "yellow"}
_JUDGEMENT_MARKS: Final = {"healthy": ("✓", "agrees"), "unknown": ("?", "unknown")}
_HIDDEN: Final[dict[str, Any]] = {"aria-hidden": "true"}
_BAD_MARK: Final = ("!", "disagrees")
_EMBEDDED_PIXELS: Final = 480


def chart_card(
    key: str,
    graph_id: Any,
    *,
    note: str = "",
    header: Any = None,
    height: int = 300,
    title: str = "",
    is_map: bool = False,
    has_keys: bool = False,
) -> dmc.Paper:
    """A chart with its title and help; `header` takes the title's place (a select, say).

    is_map: its cells are picked with the keyboard, too. has_keys: its curves are zoomed with it.
    """
    keys: dict[str, Any] = {"data-map": "", "tabIndex": "0", "role": "application"} if is_map else {}
    keys |= {"aria-label": f"{title}: arrow keys walk its cells, Enter picks one"} if is_map else {}
    keys |= curve_keys(title or describe(key).title) if has_keys else {}
    description = describe(key)
    blank = empty_figure("", height=height)
    graph = dcc.Graph(id=graph_id, figure=blank, config=GRAPH_CONFIG, clear_on_unhover=True)
    foot = [dmc.Text(note, size="xs", className="quiet"), save_buttons(title or description.title)]
    return card(
        header if header is not None else help_text(title or description.title, description),
        html.Div(graph, className="figure-place", **keys),
        *([html.Div(id="map-cell", role="status", className="quiet map-cell")] if is_map else []),
        html.Div(foot, className="chart-foot"),
        kind="chart-card",
    )


def card(title: Any, *parts: Any, kind: str = "", note: str = "", **more: Any) -> dmc.Paper:
    """A card of these parts; above them its title, unless it is empty, below them a note in small print."""
    heading = html.H2(title, className="card-title") if isinstance(title, str) else title
    head = [] if title == "" else [heading]
    foot = [dmc.Text(note, size="xs", className="quiet", px=10, pt=6)] if note else []
    return dmc.Paper([*head, *parts, *foot], className=f"card {kind}".strip(), withBorder=True, **more)


def select(identifier: Any, label: str, data: Any, value: str | None, **more: Any) -> dmc.Select:
    """A choice of one of many."""
    return dmc.Select(id=identifier, data=data, value=value, size="xs", **{"aria-label": label}, **more)


def filter_select(identifier: str, label: str, choices: Mapping[Any, str], value: str | None, **more: Any) -> Any:
    """A choice that may be empty; `choices` are titles by value. `told`: its name where `label` is too short."""
    data = [{"value": value, "label": title} for value, title in choices.items()]
    named = {"placeholder": label, "className": "filter", "clearable": True, **more}
    return select(identifier, named.pop("told", label), data, value, **named)


def segments(identifier: str, title: str, choices: Mapping[str, str], value: str) -> html.Div:
    """A choice of one of few, under its name; `choices` are titles by value."""
    data = [{"value": value, "label": label} for value, label in choices.items()]
    return labelled(title, dmc.SegmentedControl(id=identifier, data=data, value=value, size="xs"))


def curve_keys(title: str, more: str = "") -> dict[str, Any]:
    """Attributes of the place of curves whose zoom, that of all of the page, the keyboard changes.

    `more`: what else it does there.
    """
    told = f"{title}: plus and minus zoom all curves, the arrow keys move them, 0 shows them whole{more}"
    return {"data-curves": "", "tabIndex": "0", "role": "application", "aria-label": told}


def chart_note(key: str, strategies: Sequence[str | None]) -> str:
    """A caution beside a chart, so that nobody reads too much into it; empty for most."""
    if key.startswith("lost_") and any(is_stochastic(name) for name in strategies):
        return "Stochastic rounding delivers updates on average, so the share lost in one step misjudges it."
    if key == "edq_ratio":
        return "Does not see errors already in the optimizer state: check the state decrement or the oracle, too."
    if key == "oracle_displacement_ratio":
        return "Compare only runs with equally many oracle steps."
    return ""


def save_buttons(title: str) -> html.Div:
    """A chart's numbers and its picture as files; the page's scripts make them from the drawn data."""
    kinds = {"csv": "CSV", "png": "PNG", "svg": "SVG"}
    buttons = []
    for kind, text in kinds.items():
        named: dict[str, Any] = {"data-save": kind, "data-title": title, "aria-label": f"{title} as {text}"}
        buttons.append(html.Button(text, type="button", className="save", **named))
    return html.Div(buttons, className="saves")


def help_text(title: str, description: Description) -> dmc.Tooltip:
    """A title that explains itself when pointed at."""
    lines = [description.help] + ([description.formula] if description.formula else [])
    lines += [f"Unit: {description.unit}"] if description.unit not in {"", "1"} else []
    return dmc.Tooltip(
        html.H2(title, className="card-title"),
        label=html.Div([html.Div(line) for line in lines]),
        multiline=True,
        w=340,
        position="top-start",
        openDelay=250,
    )


def judgement_mark(health: str) -> tuple[str, str]:
    """(sign, kind) of a health."""
    return _JUDGEMENT_MARKS.get(health, _BAD_MARK)


def verdict_line(health: str, said: Any) -> html.Div:
    """A verdict behind the sign of a health."""
    return html.Div([judgement_sign(health), html.Div(said)], className="verdict")


def judgement_sign(health: str) -> html.Span:
    """The sign of a health; it is no traffic light."""
    mark, kind = judgement_mark(health)
    return html.Span(mark, className=f"mark mark-{kind}", **_HIDDEN)


def shown_if(there: object) -> dict[str, str]:
    """The style of what stands there only then; its place stays, for answers that change it."""
    return {} if there else {"display": "none"}


def page(children: list[Any], title: str) -> html.Div:
    """A page whose browser tab says `title`."""
    named: dict[str, Any] = {"data-title": title}
    return html.Div(children, **named)


def refresh_marker(identifier: str, milliseconds: int | None = None) -> html.Div:
    """The element that holds a page's refresh interval; empty: it does not refresh."""
    return html.Div(str(milliseconds or ""), id=identifier, className="pace", hidden=True)


def over_steps(overview: wire.Overview | None) -> str:
    """What the numbers of an overview are over: its recent past."""
    if overview is None or overview.last_step is None:
        return "nothing measured yet"
    if overview.first_step == overview.last_step:
        return f"at step {overview.last_step:,}"
    return f"over steps {overview.first_step:,} to {overview.last_step:,}"


def share_links(run_ids: Sequence[str], left_out: int = 0) -> list[Any]:
    """Buttons for the page's address and its picture, and a link to one HTML file about these runs, to keep or
    send; left_out: the number of further requested runs."""
    pairs = [("run", run_id) for run_id in run_ids] + ([("left_out", str(left_out))] if left_out else [])
    address = f"/report?{urlencode(pairs)}"
    told: dict[str, Any] = {"title": "One HTML file, readable without server or network"}
    buttons: dict[str, dict[str, Any]] = {
        "Copy link": {"data-copies": ""},
        "Download picture": {"data-pictures": ""},
    }
    pressed = [
        [html.Button(text, type="button", className="textual", **does), html.Span(role="status"), " · "]
        for text, does in buttons.items()
    ]
    return [
        *chain.from_iterable(pressed),
        html.A("Download report", href=address, download="", **told),
    ]


def embed_note(address: str, parts: Mapping[str, str]) -> html.Details:
    """The lines that show a page within another one, whole or in part.

    address: the page's, from its root on. parts: what `embed` may be there (`assets/style.css`), and what that is.
    """
    root = request.url_root.rstrip("/") if has_request_context() else ""
    address += "&" if "?" in address else "?"
    lines = [
        f'<iframe src="{escape(root + address)}embed={part}" title="{what}" '
        f'width="100%" height="{_EMBEDDED_PIXELS}" style="border: 0"></iframe>'
        for part, what in parts.items()
    ]
    return html.Details([html.Summary("Embed"), html.Pre("\n".join(lines), tabIndex="0")], className="pandas")


def run_label(style: LineStyle, href: str | None = None) -> Any:
    """A run's name behind its colour."""
    dot = html.Span(className=f"dot dot-{style.dash}", style={"--run-colour": style.colour})
    name = dcc.Link(style.label, href=href) if href else html.Span(style.label)
    return html.Span([dot, name], className="run-label", title=style.label)


def state_badge(state: str) -> dmc.Badge:
    """The run's state."""
    return badge(state, _STATE_COLOURS.get(state, "gray"))


def badge(text: str, color: str = "gray", variant: str = "light") -> dmc.Badge:
    """A word or two in a frame."""
    return dmc.Badge(text, color=color, variant=variant, radius="sm", tt="none")


def notice(problem: Problem | None) -> Any:
    """A problem shown above the last data; empty when all is well."""
    if problem is None:
        return None
    return dmc.Alert(f"{problem.text} What is shown was read before.", title=problem.title, color="orange", mb="md")


def tags_of(text: str) -> list[str]:
    """Tags of a text with commas between them, each once; one that holds a comma stands in quotes, as in CSV."""
    parts = chain.from_iterable(csv.reader(StringIO(text), skipinitialspace=True))
    return list(dict.fromkeys(filter(None, (part.strip() for part in parts))))


def text_of_tags(tags: Sequence[str]) -> str:
    """The text that `tags_of` reads as these tags."""
    return ", ".join(map(_as_csv, tags))


def _as_csv(field: str) -> str:
    written = StringIO()
    csv.writer(written, lineterminator="\n").writerow([field])
    return written.getvalue().removesuffix("\n")


def refusal(error: CollageError) -> dmc.Alert:
    """Why nothing was written."""
    title = "This token may not change anything" if isinstance(error, NotAuthorised) else "Not written"
    return dmc.Alert(str(error), title=title, color="orange", mb="md")


def problem_page(problem: Problem, *, retry: bool = False, order: int = 1) -> html.Div:
    """A page that cannot show the requested data, and says what to do. With `retry` it asks again by itself.

    `order`: that of its heading, 1 where nothing else stands on the page.
    """
    lines: list[Any] = [
        dmc.Title(problem.title, order=order, size="h2"),
        dmc.Text(problem.text, className="quiet", maw=620, ta="center"),
    ]
    lines += [dmc.Code(line, block=True, className="command") for line in problem.command.splitlines()]
    if retry:
        lines.append(dmc.Text("This page retries automatically.", size="sm", className="quiet"))
        lines.append(html.Div(str(LIVE_MILLISECONDS), id={"type": "retry", "index": 0}, className="pace"))
    lines.append(dcc.Link("All runs", href="/runs"))
    return html.Div(dmc.Stack(lines, align="center", gap="md"), className="problem")


def moment(seconds: float, *, ago: bool = False) -> html.Time:
    """A Unix time: the page's scripts show it as the reader's clock has it, or as "3 min ago"; in UTC on hover."""
    return html.Time(when(seconds), dateTime=iso(seconds), title=when(seconds), className="ago" if ago else "")


LIVE_MILLISECONDS: Final = 3000
IDLE_MILLISECONDS: Final = 30_000
"""Between refreshes of what has ended: it may be resumed."""


def milliseconds_after(seconds: float) -> int:
    """Milliseconds until the next refresh after one that took `seconds`: a slow server gets fewer requests."""
    return max(LIVE_MILLISECONDS, round(4000 * seconds))


def refresh_milliseconds(rows: Sequence[wire.RunRow], seconds: float) -> int:
    """Milliseconds until these runs are looked at again, after a look that took `seconds`.

    Runs that are not evaluated yet refresh soon; ended ones seldom.
    """
    pending = any(row.state == "running" or row.overview is None for row in rows)
    return milliseconds_after(seconds) if pending else IDLE_MILLISECONDS


def curve_controls(page: str, view: View) -> list[Any]:
    """What acts on all curves of a page: their x axis, the scale of the y axis, and how much the past weighs."""
    smoothing = dmc.Slider(
        id=f"{page}-smoothing",
        value=view.smoothing,
        min=0,
        max=0.99,
        step=0.01,
        precision=2,
        size="sm",
        w=180,
        my=9,
        updatemode="mouseup",
        thumbLabel="Smoothing of logged curves",
    )
    return [
        segments(f"{page}-axis", "Axis", {"step": "Step", "tokens": "Tokens", "time": "Time"}, view.axis),
        segments(f"{page}-scale", "Scale", {"linear": "Linear", "log": "Log"}, view.scale),
        labelled("Smoothing of logged curves", smoothing),
    ]


def menu(title: str, *parts: Any) -> html.Details:
    """What stands behind a button."""
    named: dict[str, Any] = {"role": "group", "aria-label": title}
    return html.Details([html.Summary(title), html.Div(parts, className="menu-card", **named)], className="menu")


def labelled(text: str, control: Any) -> html.Div:
    """A control under its name."""
    return html.Div([dmc.Text(text, size="xs", className="quiet", mb=2), control])
