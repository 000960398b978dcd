"""Points of several runs laid side by side, so that they are merged and finished in one pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collage_server.store.contract import Points

__all__ = ["SideBySide", "alike", "concatenated"]


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Points of runs that have the same statistics, one run after the other; `places` says where each stands."""

    run_ids: list[str]
    world_sizes: list[int]
    places: list[slice]
    points: Points

    def split(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """An array over all points, by run."""
        return [array[place] for place in self.places]


def alike(points: Mapping[str, Points], metric: str | None = None) -> list[SideBySide]:
    """The runs in groups of equal statistics; extremes are kept of `metric` alone."""
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for run_id, held in points.items():
        groups[(metric in held.extremes, *held.totals)].append(run_id)
    return [_joined(run_ids, [points[run_id] for run_id in run_ids], metric) for run_ids in groups.values()]


def _joined(run_ids: list[str], members: Sequence[Points], metric: str | None) -> SideBySide:
    ends = np.cumsum([len(held.steps) for held in members]).tolist()
    places = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    sizes = [held.world_size for held in members]
    return SideBySide(run_ids, sizes, places, concatenated(members, metric))


def concatenated(members: Sequence[Points], metric: str | None = None) -> Points:
    """Points one after the other. What some of them lack is NaN there; extremes are kept of `metric` alone."""
    if len(members) == 1:
        return members[0]
    names = ("first_steps", "steps", "times", "ranks", "counts")
    joined: dict[str, Any] = {name: np.concatenate([getattr(held, name) for held in members]) for name in names}
    gaps = [np.full(len(held.steps), np.nan) for held in members]
    totals = {
        key: np.concatenate([held.totals.get(key, gap) for held, gap in zip(members, gaps, strict=True)])
        for key in dict.fromkeys(key for held in members for key in held.totals)
    }
    extremes = {}
    if metric is not None and metric in members[0].extremes:
        pairs = [held.extremes[metric] for held in members]
        extremes[metric] = (np.concatenate([low for low, _ in pairs]), np.concatenate([high for _, high in pairs]))
    return replace(members[0], **joined, totals=totals, extremes=extremes)
