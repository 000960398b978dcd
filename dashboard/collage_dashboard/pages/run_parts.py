"""The run page in words and numbers: who the run is, three numbers with a verdict, all that is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html

from collage_dashboard.components import Entry, number_card, state_badge, verdict_line
from collage_dashboard.descriptions import state_key
from collage_dashboard.formatting import byte_count, count, interval, number, when
from collage_dashboard.identities import strategy_title
from collage_monitor import wire
from collage_monitor.judgement import judge

__all__ = ["about", "head", "summary"]

_INTENT = {
    "shadow": "an fp64 shadow step on sampled elements",
    "rule": "the optimizer's own rule in fp64",
    "whole-tensor": "an fp64 shadow step on whole tensors, in rotation",
    "before-after": "nothing: only what changed is known, so there is no EDQ",
}


def head(run: wire.Run) -> html.Div:
    """Name, state, and what the agent saw."""
    badges: list[Any] = [state_badge(run.state)]
    watch = run.watch
    if watch is not None:
        badges.append(_badge(strategy_title(watch.strategy or watch.observed_strategy)))
        badges.append(_badge(watch.dtype))
        badges.append(_badge(watch.optimizer))
        if watch.strategy and watch.observed_strategy not in {"unknown", watch.strategy}:
            text = f"observed: {strategy_title(watch.observed_strategy)}"
            badges.append(dmc.Badge(text, color="orange", variant="filled", radius="sm", tt="none"))
    step = dmc.Text(
        "no step yet" if run.last_step is None else f"step {count(run.last_step)}", c="dimmed", size="sm"
    )
    updated = dmc.Text(f"updated {when(run.updated_at)}", c="dimmed", size="sm")
    return html.Div(
        [dmc.Title(run.name, order=2), *badges, html.Div(className="spring"), step, updated], className="toolbar"
    )


def summary(run: wire.Run, compared: wire.ComparedRun) -> html.Div:
    """Three numbers, merged over all measured steps, with the newest step's beside them; and the verdict."""
    validated = "validation_loss" in run.scalars
    loss = run.scalars.get("validation_loss" if validated else "loss")
    keys = ("edq_ratio", state_key(compared.merged))
    cards = [
        number_card(key, [Entry(number(compared.merged.get(key)), _beside(key, run, compared))]) for key in keys
    ]
    cards.append(
        number_card(
            "validation_loss" if validated else "loss",
            [Entry(number(loss.value) if loss else number(None), f"at step {loss.step}" if loss else "not logged")],
        )
    )
    return html.Div(
        [
            html.Div(cards, className="three"),
            html.Div(verdict_line(judge(compared.merged)), style={"marginTop": "14px"}),
        ]
    )


def about(run: wire.Run) -> dmc.Paper:
    """Everything else that is known about the run."""
    watch = run.watch
    facts: list[tuple[str, str]] = [("Run", run.run_id), ("Project", run.project)]
    facts += [("Group", run.group)] if run.group else []
    facts += [("Tags", ", ".join(run.tags))] if run.tags else []
    facts += [("Notes", run.notes)] if run.notes else []
    facts += [("Created", when(run.created_at)), ("Seed", "–" if run.seed is None else str(run.seed))]
    if watch is not None:
        facts += _watch_facts(watch)
    facts += [
        (f"Attempt {attempt.attempt}", f"from step {attempt.first_step}, {when(attempt.created_at)}")
        for attempt in run.attempts
    ]
    facts += [(name, _scalar(name, entry)) for name, entry in sorted(run.scalars.items())]
    facts += [(f"config: {name}", json.dumps(value)) for name, value in sorted(run.config.items())]
    return dmc.Paper(_table(facts), className="card facts", withBorder=True, mt=24)


def _beside(key: str, run: wire.Run, compared: wire.ComparedRun) -> str:
    bounds = interval(compared.merged.get(f"{key}_low"), compared.merged.get(f"{key}_high"))
    newest = f"newest step {number(run.latest.get(key))}"
    return f"95 %: {bounds} · {newest}" if bounds else newest


def _watch_facts(watch: wire.WatchInfo) -> list[tuple[str, str]]:
    sample = "whole tensors" if watch.sample == "all" else f"{watch.sample} elements a tensor"
    facts = [
        ("Strategy declared", strategy_title(watch.strategy) if watch.strategy else "–"),
        ("Strategy observed", strategy_title(watch.observed_strategy)),
        ("Optimizer", watch.optimizer),
        ("Parameters", f"{count(watch.parameters)} in {watch.dtype}"),
        ("Measured", f"every {watch.every} steps, {sample}"),
        ("Intended update from", _INTENT[watch.intent]),
    ]
    facts += [("Because", watch.intent_reason)] if watch.intent_reason else []
    if watch.fingerprint is not None:
        facts += _fingerprint_facts(watch.fingerprint)
    facts += [("Oracle", "on" if watch.oracle else "off: watch(…, oracle=True) attaches one")]
    return [*facts, ("Agent", f"{watch.agent_version} on {watch.host}")]


def _fingerprint_facts(seen: wire.Fingerprint) -> list[tuple[str, str]]:
    """What the agent saw of how weights and states are kept; findings first."""
    facts = [("Finding", found) for found in seen.findings]
    if seen.states:
        facts.append(("States", ", ".join(f"{key} {kept}" for key, kept in seen.states.items())))
    if seen.master:
        facts.append(("Stored weight", seen.master))
    if seen.residual:
        sign = "+" if seen.residual_sign > 0 else "−"
        facts.append(("Stored weight", f"parameter {sign} {seen.residual}"))
    if seen.stochastic_rounding is not None:
        facts.append(("Stochastic rounding", "seen" if seen.stochastic_rounding else "not seen"))
    return [*facts, ("Implementation", seen.implementation)]


def _scalar(name: str, entry: wire.LoggedScalar) -> str:
    shown = byte_count(entry.value) if name == "memory_bytes" else number(entry.value)
    return f"{shown} at step {entry.step}"


def _table(facts: Sequence[tuple[str, str]]) -> dmc.Table:
    rows = [dmc.TableTr([dmc.TableTd(name), dmc.TableTd(text)]) for name, text in facts]
    return dmc.Table(dmc.TableTbody(rows), verticalSpacing=6)


def _badge(text: str) -> dmc.Badge:
    return dmc.Badge(text, variant="outline", color="gray", radius="sm", tt="none")
