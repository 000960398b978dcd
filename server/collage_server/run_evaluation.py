"""The evaluation of one run: reads what its overview needs, within the memory that there is.

The overviews, the alerts and the table of runs judge a run by it; `queries/overview.py` holds the arithmetic.

That an overview says what `show` and `judge` say of the same points is tested in
`tests/diagnosis/test_same_words.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from collage_monitor import wire
from collage_monitor.diagnosis import OF_LAYERS
from collage_monitor.statistics import statistics_for
from collage_server.errors import NeedsTooMuch
from collage_server.memory_budget import released_afterwards
from collage_server.queries.overview import (
    OverviewPoints,
    begin_of_recent_past,
    edq_changes,
    find_silent_ranks,
    intended_share,
    most_losing,
    overview,
)
from collage_server.store import Points, RunRecord, Selection, Snapshot

__all__ = ["evaluate", "evaluate_what_fits"]

_HISTORY_POINTS: Final = 128
_PRESENT_POINTS: Final = 64
"""Of the recent past: the newest of them are "now"."""
_RECENT_POINTS: Final = 2000
_MOST_CUTS: Final = 5
"""Each takes the newest quarter of what did not fit."""
_MOST_LAYERS: Final = 1024
"""Whose histories are looked through for a change: those that lose the most, of a model of more."""
_LOSSES: Final = ("loss", "validation_loss")


def evaluate_what_fits(
    now: Snapshot, record: RunRecord, *, every_number: bool = False
) -> tuple[wire.Overview, int | None]:
    """The overview of the newest part of the run that fits into memory; and its first step, None: all.

    Raises:
        NeedsTooMuch: not even its last steps fit.
    """
    first, last = record.first_step or 0, record.last_step or 0
    for part in range(_MOST_CUTS + 1):
        begin = None if part == 0 else last - (last - first) // 4**part
        try:
            with released_afterwards():
                return evaluate(now, record, begin, every_number=every_number), begin
        except NeedsTooMuch:
            if part == _MOST_CUTS:
                raise
    raise AssertionError("the last part returns or raises")


def evaluate(
    now: Snapshot, record: RunRecord, first_step: int | None = None, *, every_number: bool = False
) -> wire.Overview:
    """The overview of a run as a snapshot has it; of its steps from `first_step` on. every_number: with all metrics
    of the model."""
    run_id = record.run_id

    def read(keys: tuple[str, ...] | None, selection: Selection) -> Points:
        return now.points([run_id], keys, selection)[run_id]

    recent = read(
        ("measured_steps", "intended_squared_sum", "elements"),
        Selection(first_step=first_step, points=_RECENT_POINTS),
    )
    past = Selection(first_step=begin_of_recent_past(recent, record) or first_step, points=_PRESENT_POINTS)
    layers = tuple(dict.fromkeys(key for metric in OF_LAYERS for key in statistics_for(metric, intervals=False)))
    edq, lost = (statistics_for(name, intervals=False) for name in ("edq_ratio", "lost_update_ratio"))
    model = read(None, past)
    states = tuple(key for key in model.totals if key.startswith("state_decrement_"))
    history = Selection(first_step=first_step, points=_HISTORY_POINTS)
    merged = read(layers, replace(past, points=1, by_layer=True))
    losing = most_losing(merged, _MOST_LAYERS)
    not_finite = [
        name for name in _LOSSES if name in record.scalars and not np.isfinite(float(record.scalars[name].value))
    ]
    tracked = tuple(dict.fromkeys((*edq, *lost, *states)))
    of_model = read(tracked, history)
    by_layer = read(edq, replace(history, by_layer=True, layers=losing))

    def between(first: int, last: int) -> Points:
        return read(tracked, replace(history, first_step=first, last_step=last))

    return overview(
        record,
        OverviewPoints(
            model=model,
            layers=merged,
            history=of_model,
            changes=edq_changes(of_model, by_layer, between),
            logged_losses=now.scalars([run_id], not_finite, Selection())[run_id] if not_finite else {},
            intended_share=intended_share(recent),
            silent=find_silent_ranks(recent, record, lambda: now.layers(run_id)),
            between=between,
            of_layer=lambda layer: read((*edq, *lost), replace(history, by_layer=True, layers=(layer,))),
        ),
        every_number=every_number,
    )
