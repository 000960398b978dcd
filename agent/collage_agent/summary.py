"""The numbers of a measured step, finished for people: the model's and every layer's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collage_agent.measurement import Measurement
from collage_monitor.statistics import finish_all, reduce_shards

__all__ = ["summarise"]


def summarise(measurement: Measurement | None) -> dict[str, Any]:
    """{"step", "model": {key: value}, "layers": {name: {key: value}}}; empty before the first measured step.

    Layers merge into the model as shards do. Undefined values are None. Synchronises the device.
    """
    if measurement is None:
        return {"step": None, "model": {}, "layers": {}}
    block = measurement.to_numpy()
    totals = dict(zip(measurement.layout.statistics, block, strict=True))
    finished = finish_all(totals)
    model = finish_all(reduce_shards(totals, axis=0))
    return {
        "step": measurement.step,
        "model": {key: _value(value) for key, value in model.items()},
        "layers": {
            layer.name: {key: _value(values[index]) for key, values in finished.items()}
            for index, layer in enumerate(measurement.layout.layers)
        },
    }


def _value(value: NDArray[np.float64] | np.float64) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
