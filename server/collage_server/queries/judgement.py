"""The judgement of a run, and since when it changed, from the store: the words that terminal and dashboard say."""

from __future__ import annotations

from typing import Final

import numpy as np

from collage_monitor.judgement import EDQ_TOLERANCE, Judgement, evidence_of, judge, recent_points
from collage_monitor.onset import Onset, find_onset
from collage_monitor.statistics import finish, statistics_for
from collage_monitor.wire import WatchInfo
from collage_server.store import Selection, Snapshot

__all__ = ["judgement_of", "onset_of"]

_POINTS: Final = 500
_ONSET_POINTS: Final = 128
_MOST_LAYERS: Final = 512
"""Of a larger model the words are about the whole: one alert shall not read gigabytes."""


def judgement_of(now: Snapshot, run_id: str, watch: WatchInfo | None, *, by_layer: bool = False) -> Judgement:
    """The judgement of the run's recent past, of the model; `by_layer` looks at its layers, too."""
    points = now.points([run_id], None, Selection(points=_POINTS))[run_id]
    if not len(points.steps):
        return judge(evidence_of({}, watch=watch))
    zeros = np.zeros(len(points.steps))
    squares = np.nan_to_num(points.totals.get("intended_squared_sum", zeros))
    taken = recent_points(points.counts.astype(float).tolist(), squares.tolist())
    first_step, last_step = int(points.first_steps[-taken]), int(points.steps[-1])
    layers = None
    if by_layer and len(now.layers(run_id)) <= _MOST_LAYERS:
        chosen = Selection(first_step=first_step, last_step=last_step, points=_POINTS, by_layer=True)
        layers = now.points([run_id], None, chosen)[run_id]
    with np.errstate(divide="ignore", invalid="ignore"):
        evidence = evidence_of(
            {key: values[-taken:] for key, values in points.totals.items()},
            layers.totals if layers is not None else None,
            layers.layers if layers is not None else (),
            watch=watch,
            first_step=first_step,
            last_step=last_step,
        )
    return judge(evidence)


def onset_of(now: Snapshot, run_id: str) -> Onset | None:
    """Since when the run's EDQ is what it is, if it changed."""
    points = now.points([run_id], statistics_for("edq_ratio", intervals=False), Selection(points=_ONSET_POINTS))[
        run_id
    ]
    if not len(points.steps):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        edq = finish("edq_ratio", points.totals)
    return find_onset(points.first_steps.tolist(), edq, least=EDQ_TOLERANCE)
