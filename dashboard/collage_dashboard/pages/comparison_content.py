"""The comparison in numbers: the table of runs, with their verdicts from the stored overviews.

`comparison.py` fetches and calls it; it asks no server itself (`tests/dashboard/test_pages.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import dash_mantine_components as dmc
import msgspec
from dash import html

from collage_dashboard.components import judgement_sign, over_steps, run_label
from collage_dashboard.descriptions import describe, interval, state_key
from collage_dashboard.figures.series import series_of
from collage_dashboard.run_styles import LineStyle, NamedRun, is_stochastic, strategy_title, styles_of
from collage_dashboard.tables import Cell, Column, column_cells, column_heads, wide_table
from collage_dashboard.view import run_address
from collage_monitor import wire
from collage_monitor.number_text import count, number, value_text

__all__ = [
    "COLUMNS",
    "RECENT",
    "RunNames",
    "comparison_table",
    "curve_of",
    "legend",
    "notes_on",
    "with_recent",
]

Overviews = Mapping[str, wire.Overview]
RECENT: Final = "Last 32 measured steps or more, or those since the last change, on which the verdict rests."
_PICKABLE: Final = 50


class LoggedRun(NamedRun, Protocol):
    """A run with the scalars that it logged last: a row of the table of runs, or a compared run."""

    @property
    def scalars(self) -> dict[str, wire.LoggedScalar]: ...


def legend(styles: Sequence[LineStyle]) -> list[Any]:
    """One legend for all charts; the page's scripts let a press hide a line, or with Shift all others."""
    told = "Press to hide or show; with Shift, or twice, to see it alone"
    entries = []
    for style in styles:
        named: dict[str, Any] = {"data-line": style.label, "aria-pressed": "true"}
        entries.append(html.Button(run_label(style), type="button", title=told, className="line", **named))
    return entries


def curve_of(run: wire.ComparedRun, metric: str) -> wire.Series:
    """The curve of a metric that was compared."""
    return series_of(run.series, metric)


def with_recent(runs: Sequence[wire.ComparedRun], overviews: Overviews) -> list[wire.ComparedRun]:
    """The runs with the numbers of their recent past, those that their verdicts quote."""
    return [
        msgspec.structs.replace(run, merged=found.numbers) if (found := overviews.get(run.run_id)) else run
        for run in runs
    ]


def comparison_table(runs: Sequence[wire.ComparedRun], overviews: Overviews) -> dmc.Paper:
    """Everything that the runs are compared by; measured numbers are over each run's recent past."""
    runs = with_recent(runs, overviews)
    heads = ["Run", "Verdict", "Strategy", "Over", *column_heads(COLUMNS)]
    rows = [
        [
            run_label(style, run_address(run.run_id)),
            _verdict(overviews.get(run.run_id)),
            strategy_title(run.strategy, run.dtype),
            over_steps(overviews.get(run.run_id)).removeprefix("over "),
            *column_cells(COLUMNS, run),
        ]
        for run, style in zip(runs, styles_of(runs), strict=True)
    ]
    return wide_table(heads, rows, "Compared numbers", notes_on(runs), texts=(1, 2, 3))


def _verdict(overview: wire.Overview | None) -> html.Span:
    """What is wrong with a run, in a few words; the sentence on hover."""
    if overview is None:
        return html.Span("not evaluated yet")
    return html.Span([judgement_sign(overview.health), overview.short], title=overview.headline)


def _measured(numbers: Mapping[str, wire.Number | None], key: str) -> Cell:
    return value_text(key, numbers.get(key)), interval(key, numbers.get(f"{key}_low"), numbers.get(f"{key}_high"))


def _merged(key: str) -> Callable[[wire.ComparedRun], Cell]:
    return lambda run: _measured(run.merged, key)


def _scalar(name: str) -> Callable[[LoggedRun], Cell]:
    def cell(run: LoggedRun) -> Cell:
        logged = run.scalars.get(name)
        return (value_text(name, logged.value), f"step {logged.step:,}") if logged else (number(None), "")

    return cell


def _rate(run: wire.ComparedRun) -> Cell:
    """The newest throughput that was logged, as the table of runs and the strategies have it; else that of tokens
    over time."""
    logged = run.scalars.get("tokens_per_second")
    value = logged.value if logged is not None else run.mean_scalars.get("tokens_per_second")
    return value_text("tokens_per_second", value), ""


def _state(run: wire.ComparedRun) -> Cell:
    key = state_key(run.merged)
    return value_text(key, run.merged.get(key)), key.partition("/")[2] if run.merged.get(key) is not None else ""


def _steps(run: wire.ComparedRun) -> Cell:
    return count(run.last_step), "" if run.state == "finished" else run.state


def notes_on(runs: Sequence[wire.ComparedRun]) -> str:
    """What the numbers of compared runs are over, and what must not be read into them."""
    notes = [f"{RECENT} Small print is the 95 % interval."]
    if any(is_stochastic(run.strategy) for run in runs):
        notes.append("The share lost in one step misjudges stochastic rounding, whose updates arrive on average.")
    return " ".join(notes)


def _column(title: str, key: str, cell: Callable[[wire.ComparedRun], Cell]) -> Column:
    return Column(title, describe(key).help, cell)


COLUMNS: Final = (
    Column("Steps", "The newest reported step.", _steps),
    _column("Validation loss", "validation_loss", _scalar("validation_loss")),
    Column("Training loss", "The newest logged value.", _scalar("loss")),
    _column("EDQ", "edq_ratio", _merged("edq_ratio")),
    _column("Oracle EDQ", "edq_oracle_ratio", _merged("edq_oracle_ratio")),
    _column("State decrement", "state_decrement_ratio/exp_avg_sq", _state),
    _column("Updates lost", "lost_update_ratio", _merged("lost_update_ratio")),
    _column("Bytes per parameter", "bytes_per_parameter", lambda run: (_scalar("bytes_per_parameter")(run)[0], "")),
    Column("Tokens/s", "The newest logged, otherwise tokens divided by the run's wall-clock time.", _rate),
)


class RunNames:
    """A run under the four fields that name it."""

    def __init__(self, row: wire.RunRow) -> None:
        self.run_id, self.name, self.dtype = row.run_id, row.name, row.dtype
        self.strategy = row.shown_strategy
