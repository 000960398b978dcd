"""Where only points of several steps are kept, a change of EDQ lies within one of them, not before it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from collage_server.queries.overview import edq_changes, intended_share
from collage_server.store import Points

from collage_monitor.statistics import statistics_for

MERGED, STEPS = 16, 1600
NOISE = 0.001


def kept(fall, width=MERGED):
    """Points of `width` steps; the last before `fall` arrive whole, all others to the half."""
    edq = 1.0 + NOISE * np.random.default_rng(fall).normal(size=STEPS)
    edq[fall - 1 :] -= 0.5
    last = np.arange(width, STEPS + 1, width)
    arrived = edq.reshape(-1, width).sum(1)
    totals = {"intended_squared_sum": np.full(len(last), float(width)), "intended_effective_sum": arrived}
    assert set(totals) >= set(statistics_for("edq_ratio", intervals=False)) - {"measured_steps"}
    totals["measured_steps"] = np.full(len(last), float(width))
    ones = np.ones(len(last), dtype=np.int64)
    places = {"first_steps": last - width + 1, "steps": last, "times": last.astype(float)}
    return Points(**places, ranks=ones, counts=width * ones, totals=totals)


def some(points: Points, chosen: Any) -> Points:
    names = ("first_steps", "steps", "times", "ranks", "counts")
    columns: dict[str, Any] = {name: getattr(points, name)[chosen] for name in names}
    return replace(points, **columns, totals={name: values[chosen] for name, values in points.totals.items()})


NO_LAYERS = replace(some(kept(801), slice(0)), totals={})


@pytest.mark.parametrize("fall", [801, 808, 816])
@pytest.mark.parametrize("finer", [None, MERGED, MERGED // 4, 1])
def test_a_change_is_placed_within_the_finest_point_that_is_kept(fall, finer):
    def read(first, last):
        points = kept(fall, finer)
        return some(points, (points.first_steps >= first) & (points.steps <= last))

    [found] = edq_changes(kept(fall), NO_LAYERS, read if finer else None)
    width = finer or MERGED
    assert found.last_before < fall <= found.first_changed <= fall + width


def test_the_newest_update_beside_the_usual_one():
    points = kept(801)
    assert intended_share(points) == 1.0
    points.totals["intended_squared_sum"][-1] *= 0.01**2
    assert intended_share(points) == pytest.approx(0.01)
    points.totals["intended_squared_sum"][-30:] = 0.01**2 * MERGED
    assert intended_share(points) == pytest.approx(1.0), "the rate was lowered for good"
    assert intended_share(NO_LAYERS) is None
    for usual, share in ((0.0, None), (np.nan, 1.0)):
        points = kept(801)
        points.totals["intended_squared_sum"][:-1] = usual
        assert intended_share(points) == share
        points.totals["intended_squared_sum"][-1] = np.nan
        assert intended_share(points) is None
