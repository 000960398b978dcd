"""What ranks measure, and what they report, put together as the server does it: replicas once, shards added."""

import math
from typing import Any

import numpy as np
import pytest
from collage_agent.handle import watch

from collage_monitor.statistics import reduce_shards
from tests.parallel.models import adamw, injected

STEPS = 3
RELATIVE = 1e-12
DEPENDS_ON_SHARDS = {"active_blocks", "oracle_active_blocks", "counterfactual_kept_sum/plain/fp8"}
"""Blocks are cut from each shard, and fp8's scale is made of a shard's largest weight; all else is the same.

So are the sums of squares over blocks that are called a rounding_variance.
"""


class Recorder:
    """A reporter that keeps what it gets."""

    def __init__(self):
        self.measurements: list[Any] = []

    def started(self, first_step):
        pass

    def measured(self, measurement):
        self.measurements.append(measurement)


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def measured(model, optimizer, sample="all", steps=STEPS, **options):
    recorder = Recorder()
    handle = watch(model, optimizer, every=1, sample=sample, oracle=True, budget=None, reporter=recorder, **options)
    train(model, optimizer, steps)
    return {
        "layers": [measurement.layout.layers for measurement in recorder.measurements],
        "statistics": [measurement.layout.statistics for measurement in recorder.measurements],
        "totals": [measurement.table().array for measurement in recorder.measurements],
        "info": handle.info,
        "summary": handle.summary(),
        "text": str(handle),
    }


def alone(dtype):
    model = injected(dtype)
    return measured(model, adamw(model.parameters()))


def merged_layers(ranks, index):
    """{layer: {key: total}} of the `index`-th measured step over what the ranks saw."""
    held: dict[str, list] = {}
    for seen in ranks:
        statistics, totals = seen["statistics"][index], seen["totals"][index]
        for column, layer in enumerate(seen["layers"][index]):
            values = dict(zip(statistics, totals[:, column], strict=True))
            if not all(np.isnan(value) for value in values.values()):
                held.setdefault(layer.name, []).append((layer.replica, values))
    merged = {}
    for name, parts in held.items():
        lowest = min(replica for replica, _ in parts)
        chosen = [values for replica, values in parts if replica == lowest]
        keys = dict.fromkeys(key for values in chosen for key in values)
        stacked = {key: np.array([values.get(key, np.nan) for values in chosen]) for key in keys}
        merged[name] = {key: float(value) for key, value in reduce_shards(stacked, axis=0).items()}
    return merged


def is_count(key, value):
    return (
        math.isnan(value) or key.split("/")[0].endswith(("elements", "sampled", "histogram")) or value == int(value)
    )


def without_checksums(values):
    """Only replicas have them, and the model alone is no replica."""
    return {key: value for key, value in values.items() if not key.startswith("replica_checksum")}


def assert_equal_totals(ranks, expected, steps):
    """The ranks' merged totals of each step are those of one process: counts exactly, sums but for their order."""
    for index in range(steps):
        found, wanted = merged_layers(ranks, index), merged_layers([expected], index)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert without_checksums(found[name]).keys() == values.keys()
            for key, value in values.items():
                if key in DEPENDS_ON_SHARDS:
                    continue
                if math.isnan(value):
                    assert math.isnan(found[name][key]), (name, key)
                elif key.split("/")[0].endswith("rounding_variance"):
                    assert found[name][key] >= 0, (index, name, key)
                elif is_count(key, value):
                    assert found[name][key] == value, (index, name, key)
                else:
                    assert found[name][key] == pytest.approx(value, rel=RELATIVE, abs=0), (index, name, key)
