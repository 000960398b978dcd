"""The numbers of a measured step, finished for people: the model's and every layer's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from collage_agent.measurement import Measurement
from collage_monitor.statistics import finish_all, reduce_shards

__all__ = ["summarise"]

NONE: Final[Mapping[tuple[str, ...], Measurement]] = {}


def summarise(
    measurement: Measurement | None, rarer: Mapping[tuple[str, ...], Measurement] = NONE
) -> dict[str, Any]:
    """{"step", "model": {key: value}, "layers": {name: {key: value}}}; empty before the first measured step.

    `rarer`: keys of statistics that not every step reports, and the last step that did, where they are taken from.
    Layers merge into the model as shards do. Undefined values are None. Synchronises the device.
    """
    if measurement is None:
        return {"step": None, "model": {}, "layers": {}}
    totals = _totals(measurement)
    for keys, earlier in rarer.items():
        found = _totals(earlier)
        for key in keys:
            totals[key] = np.full_like(totals["elements"], np.nan)
            totals[key][: len(found[key])] = found[key]
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


def _totals(measurement: Measurement) -> dict[str, NDArray[np.float64]]:
    return dict(zip(measurement.layout.statistics, np.array(measurement.to_numpy()), strict=True))


def _value(value: NDArray[np.float64] | np.float64) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
