"""The pieces that pages are made of: cards, notices, badges, and controls that are set from the view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import dash_mantine_components as dmc
from dash import dcc, html

from collage_dashboard.descriptions import Description, describe
from collage_dashboard.figures.style import GRAPH_CONFIG, empty_figure
from collage_dashboard.identities import RunStyle, is_stochastic
from collage_dashboard.reader import Problem
from collage_dashboard.view import View
from collage_monitor.judgement import LIMITS, Judgement

__all__ = [
    "AXIS_CHOICES",
    "LIVE_MILLISECONDS",
    "Entry",
    "axis_control",
    "chart_card",
    "chart_note",
    "help_text",
    "labelled",
    "limits_note",
    "notice",
    "number_card",
    "pace",
    "problem_page",
    "run_label",
    "smoothing_control",
    "state_badge",
    "verdict_line",
]

RETRY_MILLISECONDS: Final = 3000
_STATE_COLOURS: Final = {"running": "blue", "finished": "gray", "failed": "red", "stale": "yellow"}
_VERDICT_MARKS: Final = {"healthy": ("✓", "agrees"), "unknown": ("?", "unknown")}
_BAD_MARK: Final = ("!", "disagrees")
_ENTRIES_SHOWN: Final = 6


@dataclass(frozen=True)
class Entry:
    """One run's number on a card: the value, and a smaller line that qualifies it (an interval, a step)."""

    value: str
    detail: str = ""
    identity: RunStyle | None = None


def number_card(key: str, entries: Sequence[Entry], *, title: str = "", note: str = "") -> dmc.Paper:
    """A card of the first screen: one metric, one number a run."""
    description = describe(key)
    big = len(entries) == 1
    rows: list[Any] = [_entry(entry, big=big) for entry in entries[:_ENTRIES_SHOWN]]
    if len(entries) > _ENTRIES_SHOWN:
        rows.append(dmc.Text(f"and {len(entries) - _ENTRIES_SHOWN} more in the table below", size="xs", c="dimmed"))
    return dmc.Paper(
        [
            help_text(title or description.title, description),
            html.Div(rows, className="numbers"),
            *([dmc.Text(note, size="xs", c="dimmed", mt=8)] if note else []),
        ],
        className="card number-card",
        withBorder=True,
        **{"data-metric": key},
    )


def chart_card(
    key: str,
    graph_id: Any,
    *,
    note: str = "",
    header: Any = None,
    height: int = 300,
    title: str = "",
) -> dmc.Paper:
    """A chart with its title and help; `header` takes the title's place (a select, say)."""
    description = describe(key)
    blank = empty_figure("", height=height)
    return dmc.Paper(
        [
            header if header is not None else help_text(title or description.title, description),
            dcc.Graph(id=graph_id, figure=blank, config=GRAPH_CONFIG),
            *([dmc.Text(note, size="xs", c="dimmed", px=4)] if note else []),
        ],
        className="card chart-card",
        withBorder=True,
    )


def chart_note(key: str, strategies: Sequence[str | None]) -> str:
    """What must stand beside a chart so that nobody reads too much into it; nothing for most."""
    if key.startswith("lost_") and any(is_stochastic(name) for name in strategies):
        return "Stochastic rounding delivers updates in the mean: one step's lost share misjudges it."
    if key == "edq_ratio":
        return "Blind to errors already in the optimizer state: read it beside the state decrement or the oracle."
    if key == "oracle_displacement_ratio":
        return "Compare runs at equal oracle steps only."
    return ""


def help_text(title: str, description: Description) -> dmc.Tooltip:
    """A title that explains itself when pointed at."""
    lines = [description.help] + ([f"{description.formula}"] if description.formula else [])
    return dmc.Tooltip(
        html.H3(title, className="card-title"),
        label=html.Div([html.Div(line) for line in lines]),
        multiline=True,
        w=340,
        position="top-start",
        openDelay=250,
    )


def verdict_line(judgement: Judgement, identity: RunStyle | None = None) -> html.Div:
    """A judgement in one line; its mark is no traffic light."""
    mark, kind = _VERDICT_MARKS.get(judgement.health, _BAD_MARK)
    label = [run_label(identity), " "] if identity else []
    return html.Div(
        [html.Span(mark, className=f"mark mark-{kind}"), *label, judgement.text],
        className="verdict",
    )


def run_label(identity: RunStyle, href: str | None = None) -> Any:
    """A run's name behind its colour."""
    dot = html.Span(className=f"dot dot-{identity.dash}", style={"--run-colour": identity.colour})
    name = dcc.Link(identity.label, href=href) if href else html.Span(identity.label)
    return html.Span([dot, name], className="run-label", title=identity.label)


def state_badge(state: str) -> dmc.Badge:
    """The run's state."""
    return dmc.Badge(state, color=_STATE_COLOURS.get(state, "gray"), variant="light", radius="sm", tt="none")


def notice(problem: Problem | None) -> Any:
    """A problem above what was last read; nothing when all is well."""
    if problem is None:
        return None
    return dmc.Alert(f"{problem.text} What is shown was read before.", title=problem.title, color="orange", mb="md")


def problem_page(problem: Problem, *, retry: bool = False) -> html.Div:
    """A page that cannot show what was asked, and says what to do. With `retry` it asks again by itself."""
    lines: list[Any] = [dmc.Title(problem.title, order=2), dmc.Text(problem.text, c="dimmed", maw=620, ta="center")]
    lines += [dmc.Code(line, block=True, className="command") for line in problem.command.splitlines()]
    if retry:
        lines.append(dmc.Text("This page tries again every three seconds.", size="sm", c="dimmed"))
        lines.append(dcc.Interval(id={"type": "retry", "index": 0}, interval=RETRY_MILLISECONDS))
    lines.append(dcc.Link("All runs", href="/"))
    return html.Div(dmc.Stack(lines, align="center", gap="md"), className="problem")


def limits_note() -> dmc.Text:
    """What no number here can show."""
    return dmc.Text(LIMITS, size="xs", c="dimmed", mt="lg", className="limits")


def _entry(entry: Entry, *, big: bool) -> html.Div:
    value = html.Span(entry.value, className="value big" if big else "value")
    detail = html.Span(entry.detail, className="detail")
    if big:
        return html.Div([value, detail], className="entry single")
    label = run_label(entry.identity) if entry.identity else None
    return html.Div([label, value, detail], className="entry")


LIVE_MILLISECONDS: Final = 3000
AXIS_CHOICES: Final = (("step", "Step"), ("tokens", "Tokens"), ("time", "Time"))


def pace(seconds: float) -> int:
    """Milliseconds until the next refresh after one that took `seconds`: a slow server is asked less often."""
    return max(LIVE_MILLISECONDS, round(4000 * seconds))


def axis_control(identifier: str, view: View) -> Any:
    """What the curves run over."""
    data = [{"value": value, "label": label} for value, label in AXIS_CHOICES]
    return labelled("Axis", dmc.SegmentedControl(id=identifier, data=data, value=view.axis, size="xs"))


def smoothing_control(identifier: str, view: View) -> Any:
    """How much the past weighs in logged curves."""
    slider = dmc.Slider(
        id=identifier,
        value=view.smoothing,
        min=0,
        max=0.99,
        step=0.01,
        precision=2,
        size="sm",
        w=180,
        my=9,
        updatemode="mouseup",
    )
    return labelled("Smoothing of logged curves", slider)


def labelled(text: str, control: Any) -> html.Div:
    """A control under its name."""
    return html.Div([dmc.Text(text, size="xs", c="dimmed", mb=2), control])
