"""The overview of a run: the judgement of its recent past, with when and where problems began. Made from stored
points; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.diagnosis import (
    EDQ_TOLERANCE,
    Case,
    Evidence,
    History,
    SilentRanks,
    Track,
    evidence_of,
    finite,
    judge,
    last_change,
    recent_points,
    silent_ranks,
    tracked_metrics,
)
from collage_monitor.metrics import STATE_RATIOS, split_key
from collage_monitor.onset import Onset, find_onset, find_onsets
from collage_monitor.statistics import finished, reduce_steps
from collage_server.store import Points, RunRecord, ScalarPoints

__all__ = [
    "OverviewPoints",
    "begin_of_recent_past",
    "edq_changes",
    "find_silent_ranks",
    "intended_share",
    "most_losing",
    "overview",
]

_WORST: Final = 5
_TREND_POINTS: Final = 32
_POINTS_AROUND: Final = 12
"""Of a coarse history, on each side of a change: so much is read again."""
_MOST_READINGS: Final = 4
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
        *STATE_RATIOS,
        "update_to_weight_ratio",
    }
)
"""Metrics that pages show as numbers; each with its interval and labels."""
_LEAST_RECENT: Final = 8
"""Points, of a run of few."""


@dataclass(frozen=True, eq=False)
class OverviewPoints:
    """The input of an overview.

    model: the recent past, in points of which the newest are "now"; layers: merged into one point. history: totals
    of EDQ, the share lost and the states over the whole run, of the model; `between` reads them between two steps,
    `of_layer` those of EDQ and the share lost of a layer. logged_losses: those not finite now.
    intended_share: as in `wire.Overview`. silent: ranks that do not report any more.
    changes: `edq_changes` of the histories.
    """

    model: Points
    layers: Points
    history: Points
    logged_losses: Mapping[str, ScalarPoints] = field(default_factory=dict)
    intended_share: float | None = None
    silent: SilentRanks | None = None
    changes: Sequence[Onset] = ()
    between: Callable[[int, int], Points] | None = None
    of_layer: Callable[[str], Points] | None = None


def begin_of_recent_past(points: Points, record: RunRecord) -> int | None:
    """The first step of the recent past, from the points of `measured_steps` and `intended_squared_sum`."""
    if not len(points.steps):
        return None
    squares = np.nan_to_num(points.totals.get("intended_squared_sum", np.zeros(len(points.steps))))
    since = last_change(record.attempts, record.watch, int(points.steps[-1]))
    taken = recent_points(points.steps.tolist(), points.counts.astype(float).tolist(), squares.tolist(), since)
    return max(int(points.first_steps[-taken]), since)


def intended_share(points: Points) -> float | None:
    """‖u‖ of the newest point's steps over the 90th percentile of the run's last fifth, from the points of
    `measured_steps` and `intended_squared_sum`, each the root mean square of its steps; None where either is not
    known or 0.

    At the end of a schedule to zero it is next to nothing: what is lost then is nothing, too. A rate that was
    lowered for good is the usual one a fifth of the run later.
    """
    squares = points.totals.get("intended_squared_sum", np.full(len(points.steps), np.nan)) / points.counts
    recent = squares[-max(len(squares) // 5, _LEAST_RECENT) :]
    norms = np.sqrt(recent[np.isfinite(recent)])
    usual = float(np.percentile(norms, 90)) if len(norms) else 0.0
    return float(norms[-1]) / usual if usual and np.isfinite(squares[-1]) else None


def find_silent_ranks(
    points: Points, record: RunRecord, layers: Callable[[], Sequence[wire.Layer]]
) -> SilentRanks | None:
    """The ranks that do not report any more, from the points of `measured_steps` and `elements`.

    layers: the model's, asked for only where no step has all ranks.
    """
    firsts, sizes = np.array(points.world_sizes, dtype=np.int64).T
    expected = sizes[np.maximum(np.searchsorted(firsts, points.steps, side="right") - 1, 0)]
    if not len(points.steps) or points.ranks[-1] >= expected[-1]:
        return None
    elements = np.nan_to_num(points.totals.get("elements", np.zeros(len(points.steps)))) / points.counts
    torn = bool((points.ranks < expected).all())
    whole = float(sum(math.prod(layer.shape) for layer in layers())) if torn else 0.0
    measured, ranks = points.counts.tolist(), points.ranks.tolist()
    columns = (points.first_steps.tolist(), measured, ranks, expected.tolist(), elements.tolist())
    return silent_ranks(*columns, whole, is_over=record.state != "running")


def overview(record: RunRecord, points: OverviewPoints, *, every_number: bool = False) -> wire.Overview:
    """The evaluation of one run. every_number: with all metrics of the model, not only those that pages show."""
    facts: dict[str, Any] = {"watch": record.watch, "logged": _not_finite(points.logged_losses)}
    if (skipped := record.scalars.get("skipped_steps")) is not None:
        facts["skipped"] = finite(skipped.value) or 0.0
    if not len(points.model.steps):
        evidence = Evidence({}, **facts)
    else:
        model, layers = points.model, points.layers
        facts |= {"first_step": int(model.first_steps[0]), "last_step": int(model.steps[-1])}
        facts |= {"silent": points.silent, "history": _history(points)}
        evidence = evidence_of(model.totals, layers.totals or None, layers.layers, **facts)
    case = Case(evidence)
    shown = [key for key in evidence.model if every_number or _is_shown(key)]
    numbers: dict[str, wire.Number | None] = {
        key: case.number(key) for key in shown if (of := _interval_of(key)) is None or case.interval(of)
    }
    now = {key: moved for key in numbers if _interval_of(key) is None and (moved := case.moved(key)) is not None}
    return wire.Overview(
        **msgspec.structs.asdict(judge(evidence)),
        run_id=record.run_id,
        measured_steps=int(points.model.counts.sum()),
        numbers=numbers,
        now=now,
        intended_share=points.intended_share,
        changes=[
            wire.EdqChange(step=onset.first_changed, before=onset.before, after=onset.after)
            for onset in points.changes
            if abs(onset.after - onset.before) >= EDQ_TOLERANCE
        ],
        worst=_worst(points.layers),
        trend=_trend(points.history),
    )


def _is_shown(key: str) -> bool:
    name = split_key(key)[0]
    return name.removesuffix("_low").removesuffix("_high") in _SHOWN


def _interval_of(key: str) -> str | None:
    """The metric of which a key is an end of the interval; None: it is none."""
    of = key.removesuffix("_low").removesuffix("_high")
    return None if of == key else of


def _history(points: OverviewPoints) -> History:
    def tracks_of(history: Points) -> Iterator[tuple[str, Track]]:
        steps = history.first_steps.tolist(), history.steps.tolist()
        for key in tracked_metrics(history.totals):
            yield key, Track(*steps, finished(key, history.totals, (len(history.steps),)))

    def of_layer(key: str, layer: str) -> Track | None:
        if points.of_layer is None:
            return None
        found = points.of_layer(layer)
        values = finished(key, found.totals, (len(found.steps), 1))[:, 0] if len(found.layers) else ()
        return Track(found.first_steps.tolist(), found.steps.tolist(), values)

    between = points.between
    finer = None if between is None else lambda first, last: dict(tracks_of(between(first, last)))
    return History(dict(tracks_of(points.history)), of_layer, points.changes, finer)


def edq_changes(history: Points, layers: Points, read: Callable[[int, int], Points] | None = None) -> list[Onset]:
    """When EDQ changed at once, in order: from its history of the model and by layer, at the same steps.

    read: the model's history between two steps in finer points, by which a change is placed to the step.
    """
    series = finished("edq_ratio", history.totals, (len(history.steps),))
    if not len(layers.steps):
        found = find_onsets(
            history.first_steps.tolist(), series, least=EDQ_TOLERANCE, last_steps=history.steps.tolist()
        )
    else:
        shape = (len(layers.steps), len(layers.layers))
        by_layer = (
            finished("edq_ratio", layers.totals, shape) if layers.totals else np.zeros((len(layers.steps), 0))
        )
        columns = {name: by_layer[:, place] for place, name in enumerate(layers.layers[: by_layer.shape[1]])}
        at = dict(zip(history.steps.tolist(), series.tolist(), strict=True))
        of_model = [at.get(step, np.nan) for step in layers.steps.tolist()]
        found = find_onsets(
            layers.first_steps.tolist(),
            of_model,
            columns,
            least=EDQ_TOLERANCE,
            last_steps=layers.steps.tolist(),
        )
    if read is None or not len(history.counts) or history.counts.max() == 1:
        return found
    width = int(np.median(np.diff(history.first_steps)))
    return [_placed(onset, width, read) for onset in found]


def _placed(onset: Onset, width: int, read: Callable[[int, int], Points]) -> Onset:
    """The same change, found again among finer points, until each is a step. width: of a point, in steps."""
    for _ in range(_MOST_READINGS):
        around = _POINTS_AROUND * width
        points = read(max(onset.last_before - around, 0), onset.settled + width + around)
        series = finished("edq_ratio", points.totals, (len(points.steps),))
        finer = find_onset(
            points.first_steps.tolist(),
            series,
            least=0.5 * abs(onset.after - onset.before),
            last_steps=points.steps.tolist(),
        )
        if finer is None:
            return onset
        onset = replace(
            onset, last_before=finer.last_before, first_changed=finer.first_changed, settled=finer.settled
        )
        if points.counts.max() == 1:
            return onset
        width = int(np.median(np.diff(points.first_steps)))
    return onset


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
    """The layers that lose the most energy, in the run's order; None if there are at most `most` layers: take
    all."""
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
    """The layers that lose the most; layers without a loss are left out."""
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
        for place in np.argsort(-lost)[:_WORST].tolist()
        if lost[place] > 0
    ]


def _trend(history: Points) -> list[wire.Number | None]:
    series = finished("edq_ratio", history.totals, (len(history.steps),))
    if not len(series):
        return []
    places = np.unique(np.linspace(0, len(series) - 1, _TREND_POINTS).astype(int))
    return [wire.defined(float(f"{series[place]:.4g}")) for place in places]
