"""Matrices of tests whose cells share their code: by day a sample of the cells, in the nightly lane all of them.

A test, or a module of them, that is marked `drawn` runs by day in so few cells that every value of every parameter
comes up at least once: each row and each column of the matrix. `drawn(by=…)` names what must come up instead, where
one parameter holds a whole case: a function of the parameters. `drawn(pairs=True)`: each two values that ever meet.
The cells are drawn by the test's name, so that they stay the same from day to day and from worker to worker.
"""

import random
from collections import defaultdict
from itertools import combinations

import pytest

__all__ = ["leave_to_the_night", "sample"]


def leave_to_the_night(items):
    """Mark as nightly what of the matrices among these collected tests is not drawn."""
    matrices = defaultdict(list)
    for item in items:
        if (
            item.get_closest_marker("drawn")
            and hasattr(item, "callspec")
            and not item.get_closest_marker("nightly")
        ):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for name, cells in matrices.items():
        marker = cells[0].get_closest_marker("drawn").kwargs
        by, pairs = marker.get("by"), marker.get("pairs", False)
        features = [
            by(**item.callspec.params) if by else [*map(_known_by, item.callspec.params.values())] for item in cells
        ]
        drawn = sample(features, name, pairs=pairs)
        for place, item in enumerate(cells):
            if place not in drawn:
                item.add_marker(pytest.mark.nightly)


def sample(cells, seed, *, pairs=False):
    """The indices of as few cells as cover every value of every feature, or every pair of values, as a set.

    cells: sequences of as many hashable features each. Greedy: always a cell that covers the most that is new.
    """
    goals = []
    for cell in cells:
        own = list(enumerate(cell))
        goals.append({*combinations(own, 2)} if pairs and len(own) > 1 else {*own})
    order = random.Random(seed).sample(range(len(cells)), len(cells))
    open_goals, drawn = set().union(*goals), set()
    while open_goals:
        best = max(order, key=lambda place: len(goals[place] & open_goals))
        drawn.add(best)
        open_goals -= goals[best]
    return drawn


def _known_by(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
