"""Finished values as the wire carries them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from collage_monitor.statistics import Totals, finish, has_interval, interval
from collage_monitor.wire import Number, to_number, undefined_to_none

__all__ = ["finished", "finished_interval", "json_list", "json_number", "json_numbers"]

FloatArray = NDArray[np.float64]


def finished(key: str, totals: Totals, shape: tuple[int, ...]) -> FloatArray:
    """`finish`, also where the totals are empty: the run then cannot make the metric, and it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.array(np.broadcast_to(finish(key, totals), shape))


def finished_interval(key: str, totals: Totals) -> tuple[FloatArray, FloatArray] | None:
    """(low, high) of a metric that has an interval and whose variances were reported, else None."""
    if not has_interval(key, totals):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(key, totals)


def json_list(array: FloatArray | NDArray[np.int64]) -> list[Number | None]:
    """A one-dimensional array for JSON: undefined is null."""
    return undefined_to_none(array)


def json_number(value: float) -> Number | None:
    """One finished value for JSON: undefined is null."""
    return None if math.isnan(value) else to_number(value)


def json_numbers(table: Mapping[str, FloatArray]) -> dict[str, Number | None]:
    """Finished 0-dimensional values by key."""
    return {key: json_number(float(value)) for key, value in table.items()}
