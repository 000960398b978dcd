"""What is said of a run: its recent past judged, since when it is so, and where. Made from stored points; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.judgement import (
    EDQ_TOLERANCE,
    STATE_TOLERANCE,
    Evidence,
    Judgement,
    evidence_of,
    judge,
    recent_points,
)
from collage_monitor.metrics import split_key
from collage_monitor.onset import Onset, find_onset, first_step_if_always_below
from collage_monitor.statistics import finished, reduce_steps
from collage_server.queries.headline import headline
from collage_server.store import Points, RunRecord, ScalarPoints

__all__ = ["OverviewPoints", "begin_of_recent_past", "held_against", "most_losing", "overview"]

WORST: Final = 5
_TREND_POINTS: Final = 32
_SHOWN: Final = frozenset(
    {
        "edq_ratio",
        "edq_oracle_ratio",
        "edq_window_ratio",
        "half_ulp_margin",
        "lost_update_ratio",
        "lost_window_ratio",
        "oracle_displacement_ratio",
        "oracle_steps",
        "state_decrement_ratio",
        "update_to_weight_ratio",
    }
)
"""Metrics that pages show as numbers; each with its interval and labels."""
_STATE: Final = "state_decrement_ratio"
_NOT_AGAINST: Final = frozenset({"healthy", "unknown"})


@dataclass(frozen=True, eq=False)
class OverviewPoints:
    """What an overview is made of.

    model, layers: the recent past, merged into one point. history: EDQ's totals and the states' over the whole run,
    of the model; layer_history: EDQ's by layer, at the same steps. logged_losses: those not finite now.
    """

    model: Points
    layers: Points
    history: Points
    layer_history: Points
    logged_losses: Mapping[str, ScalarPoints] = field(default_factory=dict)


def begin_of_recent_past(points: Points) -> int | None:
    """The first step of the recent past, from the points of `measured_steps` and `intended_squared_sum`."""
    squares = np.nan_to_num(points.totals.get("intended_squared_sum", np.zeros(len(points.steps))))
    taken = recent_points(points.counts.astype(float).tolist(), squares.tolist())
    return int(points.first_steps[-taken]) if taken and len(points.steps) else None


def overview(record: RunRecord, points: OverviewPoints) -> wire.Overview:
    """The evaluation of one run."""
    not_finite = _not_finite(points.logged_losses)
    if not len(points.model.steps):
        evidence = Evidence({}, watch=record.watch)
        found = judge(evidence)
        return wire.Overview(
            run_id=record.run_id,
            health="not finite" if points.logged_losses else found.health,
            headline=headline(found, evidence, not_finite=not_finite),
            verdict=found.text,
        )
    evidence = _evidence(record, points)
    found = judge(evidence)
    since, changed = _losing_since(points)
    sentence = headline(
        found,
        evidence,
        since=since,
        changed=changed,
        states_since=_states_since(points.history),
        not_finite=not_finite,
    )
    return wire.Overview(
        run_id=record.run_id,
        first_step=evidence.first_step,
        last_step=evidence.last_step,
        measured_steps=int(points.model.counts.sum()),
        numbers={key: value for key, value in evidence.model.items() if _is_shown(key)},
        health="not finite" if points.logged_losses else found.health,
        headline=sentence,
        verdict=found.text,
        advice=found.advised,
        findings=held_against(found),
        since=since,
        worst=_worst(points.layers),
        trend=_trend(points.history),
    )


def held_against(found: Judgement) -> dict[str, float]:
    """What a finding against the run as a whole rests on, by metric; a layer's number says nothing of the model."""
    return {
        finding.key: finding.value
        for finding in found.findings
        if finding.layer is None
        and finding.health not in _NOT_AGAINST
        and finding.value is not None
        and np.isfinite(finding.value)
    }


def _is_shown(key: str) -> bool:
    name = split_key(key)[0]
    return name.removesuffix("_low").removesuffix("_high") in _SHOWN


def _evidence(record: RunRecord, points: OverviewPoints) -> Evidence:
    model, layers = points.model, points.layers
    with np.errstate(divide="ignore", invalid="ignore"):
        return evidence_of(
            model.totals,
            layers.totals or None,
            layers.layers,
            watch=record.watch,
            first_step=int(model.first_steps[0]),
            last_step=int(model.steps[-1]),
        )


def _losing_since(points: OverviewPoints) -> tuple[int | None, list[str]]:
    """The first step with the present loss, and the layers that changed with it.

    Where most of the loss came at once, its onset; else the first measured step, of a run that was never better.
    None where the loss came by and by, or grew a little from one that was there.
    """
    history, by_layer = points.history, points.layer_history
    series = finished("edq_ratio", history.totals, (len(history.steps),))
    onset = _onset(history, series, by_layer)
    if onset is not None and onset.after < onset.before and onset.explains(1.0):
        return onset.first_changed, [change.layer for change in onset.layers if change.after < change.before]
    return first_step_if_always_below(history.first_steps.tolist(), series, 1 - EDQ_TOLERANCE), []


def _onset(model: Points, series: NDArray[np.float64], layers: Points) -> Onset | None:
    """Since when EDQ is what it is; `series` is that of the model."""
    if not len(layers.steps):
        return find_onset(model.first_steps.tolist(), series, least=EDQ_TOLERANCE)
    shape = (len(layers.steps), len(layers.layers))
    by_layer = finished("edq_ratio", layers.totals, shape) if layers.totals else np.zeros((len(layers.steps), 0))
    columns = {name: by_layer[:, place] for place, name in enumerate(layers.layers[: by_layer.shape[1]])}
    at = dict(zip(model.steps.tolist(), series.tolist(), strict=True))
    of_model = [at.get(step, np.nan) for step in layers.steps.tolist()]
    return find_onset(layers.first_steps.tolist(), of_model, columns, least=EDQ_TOLERANCE)


def _states_since(history: Points) -> dict[str, int]:
    """By optimizer state, since when its decrement is what it is."""
    found = {}
    for key in history.totals:
        name, label = split_key(key)
        if name != "state_decrement_observed_sum" or not label:
            continue
        series = finished(f"{_STATE}/{label}", history.totals, (len(history.steps),))
        onset = find_onset(history.first_steps.tolist(), series, least=STATE_TOLERANCE)
        if onset is not None and onset.after < onset.before:
            found[label] = onset.first_changed
        elif onset is None:
            first = first_step_if_always_below(history.first_steps.tolist(), series, 1 - STATE_TOLERANCE)
            if first is not None:
                found[label] = first
    return found


def _not_finite(losses: Mapping[str, ScalarPoints]) -> dict[str, int]:
    """By logged name, the first step of the newest stretch that is not finite."""
    found = {}
    for name, points in losses.items():
        finite = np.flatnonzero(np.isfinite(points.values))
        place = int(finite[-1]) + 1 if len(finite) else 0
        if place < len(points.steps):
            found[name] = int(points.steps[place])
    return found


def most_losing(layers: Points, most: int) -> tuple[str, ...] | None:
    """The layers that lose the most energy, in the run's order; None: all, they are no more than `most`."""
    if len(layers.layers) <= most:
        return None
    lost = _lost_energy(layers)
    places = np.sort(np.argsort(-lost, kind="stable")[:most])
    return tuple(layers.layers[place] for place in places.tolist())


def _lost_energy(layers: Points) -> NDArray[np.float64]:
    """Σu² − Σue by layer, and 0 where that is unknown or negative."""
    intended, arrived = (layers.totals.get(key) for key in ("intended_squared_sum", "intended_effective_sum"))
    if intended is None or arrived is None or not len(layers.steps):
        return np.zeros(len(layers.layers))
    lost: NDArray[np.float64] = np.nansum(intended, axis=0) - np.nansum(arrived, axis=0)
    return np.maximum(np.nan_to_num(lost), 0.0)


def _worst(layers: Points) -> list[wire.LayerLoss]:
    """The layers that lose the most, of those that lose any."""
    lost = _lost_energy(layers)
    whole = float(lost.sum())
    if whole <= 0:
        return []
    merged = reduce_steps(layers.totals, axis=0)
    edq, share = (finished(key, merged, lost.shape) for key in ("edq_ratio", "lost_update_ratio"))
    return [
        wire.LayerLoss(
            layer=layers.layers[place],
            share=float(lost[place] / whole),
            edq_ratio=wire.defined(float(edq[place])),
            lost_update_ratio=wire.defined(float(share[place])),
        )
        for place in np.argsort(-lost)[:WORST].tolist()
        if lost[place] > 0
    ]


def _trend(history: Points) -> list[wire.Number | None]:
    series = finished("edq_ratio", history.totals, (len(history.steps),))
    if not len(series):
        return []
    places = np.unique(np.linspace(0, len(series) - 1, _TREND_POINTS).astype(int))
    return [wire.defined(float(f"{series[place]:.4g}")) for place in places]
