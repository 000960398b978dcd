"""People's notes and tags of a run, and all its facts besides the numbers.

`run.py` shows it behind a tab, the HTML report as a section (`tests/dashboard/test_pages.py`).
"""

from __future__ import annotations

import json
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import MATCH, Input, Output, State, html

from collage_dashboard.components import card, refusal
from collage_dashboard.descriptions import when
from collage_dashboard.navigation import view_of
from collage_dashboard.run_styles import strategy_title
from collage_dashboard.server_reader import Reader
from collage_dashboard.tables import table
from collage_monitor import wire
from collage_monitor.errors import CollageError
from collage_monitor.number_text import count, number, value_text

__all__ = ["about", "facts_of", "register_writing"]

_INTENT: Final = {
    "shadow": "an fp64 shadow step on sampled elements",
    "rule": "the optimizer's own rule in fp64",
    "whole-tensor": "an fp64 shadow step on whole tensors, in rotation",
    "whole-optimizer": "a step of a copy of the whole optimizer in fp64",
    "before-after": "nothing: only what changed is known, so there is no EDQ",
}


def about(run: wire.Run) -> html.Div:
    """People's notes and tags of the run, and its other facts."""
    return html.Div(
        [_written(run), card("", table((), facts_of(run), texts=(1,), verticalSpacing=6), kind="facts", mt=14)]
    )


def facts_of(run: wire.Run) -> list[tuple[str, str]]:
    """The run's facts besides its numbers, as (name, value)."""
    watch = run.watch
    facts: list[tuple[str, str]] = [("Run", run.run_id), ("Project", run.project)]
    facts += [("Group", run.group)] if run.group else []
    facts += [("Created", when(run.created_at)), ("Seed", "–" if run.seed is None else str(run.seed))]
    if watch is not None:
        facts += _watch_facts(watch)
    facts += [
        (f"Attempt {attempt.attempt}", f"from step {attempt.first_step:,}, {when(attempt.created_at)}")
        for attempt in run.attempts
    ]
    facts += [(name, _scalar(name, entry)) for name, entry in sorted(run.scalars.items())]
    return facts + [(f"config: {name}", json.dumps(value)) for name, value in sorted(run.config.items())]


def _written(run: wire.Run) -> dmc.Paper:
    """Tags and notes, edited where they stand."""
    tags = dmc.TagsInput(
        id={"type": "run-tags", "index": 0}, label="Tags", value=run.tags, placeholder="Enter adds one", maxTags=64
    )
    notes = dmc.Textarea(
        id={"type": "run-notes", "index": 0},
        label="Notes",
        value=run.notes,
        autosize=True,
        minRows=2,
        maxRows=12,
        debounce=True,
    )
    save = dmc.Button("Save", id={"type": "run-save", "index": 0}, variant="default", mt="sm")
    saved = html.Span(id={"type": "run-saved", "index": 0}, role="status", className="saved")
    return card("", tags, notes, save, saved, kind="written", mt=24)


def _watch_facts(watch: wire.WatchInfo) -> list[tuple[str, str]]:
    sample = "whole tensors" if watch.sample == "all" else f"{watch.sample:,} elements a tensor"
    facts = [
        ("Strategy declared", strategy_title(watch.strategy) if watch.strategy else "–"),
        ("Strategy observed", strategy_title(watch.observed_strategy)),
        ("Optimizer", watch.optimizer),
        ("Parameters", f"{count(watch.parameters)} in {watch.dtype}"),
        ("Measured", f"every {watch.every:,} steps, {sample}"),
        ("Intended update from", _INTENT[watch.intent]),
    ]
    facts += [("Because", watch.intent_reason)] if watch.intent_reason else []
    facts += [("Expected", watch.expected)] if watch.expected else []
    facts += [("Expectation broken", str(breach)) for breach in watch.broken]
    facts += [("Lost at the resume", loss.text) for loss in watch.resume_losses]
    facts += [("Goes on from", str(watch.continuation))] if watch.continuation is not None else []
    if watch.fingerprint is not None:
        facts += _fingerprint_facts(watch.fingerprint)
    facts += [("Oracle", "on" if watch.oracle else "off: watch(…, oracle=True) attaches one")]
    return [*facts, ("Agent", f"{watch.agent_version} on {watch.host}")]


def _fingerprint_facts(seen: wire.Fingerprint) -> list[tuple[str, str]]:
    """The agent's observations on how weights and states are kept; findings first."""
    facts = [("Finding", found) for found in seen.findings]
    if states := seen.states | seen.factored:
        facts.append(("States", ", ".join(f"{key} {kept}" for key, kept in states.items())))
    if seen.master:
        facts.append(("Stored weight", seen.master))
    if seen.residual:
        sign = "+" if seen.residual_sign > 0 else "−"
        facts.append(("Stored weight", f"parameter {sign} {seen.residual}"))
    if seen.stochastic_rounding is not None:
        facts.append(("Stochastic rounding", "seen" if seen.stochastic_rounding else "not seen"))
    elif at_random := sum(seen.layer_rounds_at_random.values()):
        facts.append(("Stochastic rounding", f"seen in {at_random} of {len(seen.layer_rounds_at_random)} layers"))
    return [*facts, ("Implementation", seen.implementation)]


def _scalar(name: str, entry: wire.LoggedScalar) -> str:
    shown = value_text(name, entry.value)
    if name == "memory_bytes":
        shown = f"{number(wire.from_number(entry.value) / 2**20)} MiB"
    return f"{shown} at step {entry.step:,}"


def register_writing(app: dash.Dash, reader: Reader) -> None:
    """Bind tags and notes to the application."""

    @app.callback(
        Output({"type": "run-saved", "index": MATCH}, "children"),
        Input({"type": "run-save", "index": MATCH}, "n_clicks"),
        State({"type": "run-tags", "index": MATCH}, "value"),
        State({"type": "run-notes", "index": MATCH}, "value"),
        State("run-shown", "data"),
        prevent_initial_call=True,
    )
    def save(clicks: int | None, tags: list[str] | None, notes: str | None, shown: dict[str, str]) -> Any:
        if not clicks:
            raise dash.exceptions.PreventUpdate
        run_id = view_of(shown).runs[0]
        update = wire.RunUpdate(tags=tags or [], notes=notes or "")
        try:
            reader.ask(lambda client: client.update_run(run_id, update))
        except CollageError as error:
            return refusal(error)
        return "Saved."
