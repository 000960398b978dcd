"""Casts: how much of an update reaches a low-precision copy of the weights, for the forward pass or for a sampler.

The agent measures it in `collage_agent/stats/casts.py`; formulas are those of `docs/metrics.md`, and names are
fixed (`tests/agent/stats/test_casts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from collage_monitor.definitions import Array, Definition, Metric, Statistic, ratio, sums

__all__ = ["CodeSizes", "DEFINITION", "FORMATS", "is_copy", "is_route_pair", "route_pairs"]


@dataclass(frozen=True)
class CodeSizes:
    """Bytes of a format's copies: of a code, of a scale, and how many codes share one (0: no scale that counts)."""

    code: float
    scale: float = 0.0
    shared_by: int = 0

    @property
    def dense(self) -> float:
        """Bytes of an element, its part of the scale included."""
        return self.code + (self.scale / self.shared_by if self.shared_by else 0.0)

    @property
    def changed_scale(self) -> float:
        """Bytes of an element's part of a scale that is sent with its place."""
        return (self.scale + _PLACE_BYTES) / self.shared_by if self.shared_by else 0.0


FORMATS: Final = {
    "bf16": CodeSizes(2),
    "fp16": CodeSizes(2),
    "fp8_e4m3": CodeSizes(1),
    "fp8_e5m2": CodeSizes(1),
    "fp8_tensor": CodeSizes(1),
    "fp8_block128": CodeSizes(1, 4, 128 * 128),
    "fp8_block128_ue8m0": CodeSizes(1, 1, 128 * 128),
    "mxfp8": CodeSizes(1, 1, 32),
    "nvfp4": CodeSizes(0.5, 1, 16),
    "nvfp4_2d": CodeSizes(0.5, 1, 16 * 16),
    "int8_tensor": CodeSizes(1),
    "int8_channel": CodeSizes(1),
    "int4_channel": CodeSizes(0.5),
    "int4_group32": CodeSizes(0.5, 4, 32),
    "int4_group128": CodeSizes(0.5, 4, 128),
    "uint4_group32": CodeSizes(0.5, 5, 32),
}
"""What copies can be kept in; docs/reference/copies-and-averages.md has their arithmetic."""
_UNSCALED: Final = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
"""Formats that a route may lead through: those without scales."""
_PLACE_BYTES: Final = 4
"""Of a changed number's place in a delta: a 32-bit index."""


def is_copy(name: str) -> bool:
    """Whether a copy is called so: a format, or a route to it such as "bf16>fp8_block128"."""
    *before, last = formats = name.split(">")
    return last in FORMATS and all(part in _UNSCALED for part in before) and len(set(formats)) == len(formats)


def is_route_pair(label: str) -> bool:
    """Whether a label names two routes to one format: "fp8_block128/bf16>fp8_block128"."""
    first, _, second = label.partition("/")
    return is_copy(first) and is_copy(second) and first != second and _last(first) == _last(second)


def route_pairs(casts: Sequence[str]) -> list[str]:
    """The labels of all pairs among these copies that are routes to one format, in their order."""
    return [label for pair in combinations(casts, 2) if is_route_pair(label := "/".join(pair))]


def _last(name: str) -> str:
    return name.rpartition(">")[2]


def _delta_bytes(elements: Array, changed: Array, recoded: Array, rescaled: Array, label: str) -> Array:
    """Bytes of codes and scales that changed, each with its place: an index, or where less a bit of every code."""
    sizes = FORMATS[_last(label.partition("/")[0])]
    codes = np.where(np.isnan(recoded), changed, recoded)
    places = np.minimum(_PLACE_BYTES * codes, elements / 8)
    found: Array = codes * sizes.code + places + np.nan_to_num(rescaled) * sizes.changed_scale
    return found


def _sync_ratio(elements: Array, changed: Array, recoded: Array, rescaled: Array, *, label: str) -> Array:
    dense = elements * FORMATS[_last(label.partition("/")[0])].dense
    return ratio(_delta_bytes(elements, changed, recoded, rescaled, label), dense)


def _sync_bytes(
    elements: Array, changed: Array, steps: Array, recoded: Array, rescaled: Array, *, label: str
) -> Array:
    return ratio(_delta_bytes(elements, changed, recoded, rescaled, label), steps)


def _sync_window_bytes(elements: Array, changed: Array, recoded: Array, rescaled: Array, *, label: str) -> Array:
    return _delta_bytes(elements, changed, recoded, rescaled, label)


def _window(name: str, unit: str, text: str) -> Statistic:
    return Statistic(name, "sum", "last", unit, text, "format/steps", ("intended",))


DEFINITION = Definition(
    statistics=(
        *sums(
            "elements",
            label="format",
            cast_elements="Finite elements whose copy is known, before the step and after it.",
            cast_changed="Those of them whose copy is another number after the step.",
        ),
        *sums(
            "elements",
            label="format",
            cast_recoded="Those whose number in the copy, before it is scaled, is another one after the step.",
            cast_rescaled="Those whose block's or tile's scale in the copy is another one after the step.",
        ),
        *sums(
            "elements",
            label="routes",
            cast_route_elements="Finite elements whose copies by both routes are known after the step.",
            cast_route_differing="Those whose codes differ between the two routes.",
        ),
        *sums(
            "weight²",
            needs=("intended",),
            label="format",
            cast_squared_sum="Σ u² of the elements whose copy is known.",
            cast_effective_sum="Σ u·c, c = the change of the copy.",
        ),
        _window("cast_window_elements", "elements", "Elements whose copy is known at both ends of the window."),
        _window("cast_window_changed", "elements", "Those whose copy is another number at the window's end."),
        _window("cast_window_recoded", "elements", "Those whose number is another one before it is scaled."),
        _window("cast_window_rescaled", "elements", "Those whose block's or tile's scale is another one."),
        _window("cast_window_squared_sum", "weight²", "Σ U² of the elements whose copy is known."),
        _window("cast_window_effective_sum", "weight²", "Σ U·C, C = the copy now − the copy then."),
    ),
    metrics=(
        Metric(
            "cast_changed_ratio",
            "Copies changed",
            "share",
            "cast_changed / cast_elements",
            "Share of the elements whose low-precision copy is another number after the step: what a sampler sees.",
            needs=("cast_changed", "cast_elements"),
            finish=ratio,
            label="format",
        ),
        Metric(
            "cast_recoded_ratio",
            "Codes changed",
            "share",
            "cast_recoded / cast_elements",
            "Share of the elements whose number changed in a copy with scales, before it is scaled.",
            needs=("cast_recoded", "cast_elements"),
            finish=ratio,
            label="format",
        ),
        Metric(
            "cast_edq_ratio",
            "EDQ of the copy",
            "ratio",
            "Σ u·c / Σ u², c = the change of the low-precision copy",
            "Share of the intended descent that a low-precision copy of the weights has made in this step.",
            needs=("cast_effective_sum", "cast_squared_sum"),
            finish=ratio,
            label="format",
            ideal=1.0,
        ),
        Metric(
            "cast_changed_window_ratio",
            "Copies changed over a window",
            "share",
            "cast_window_changed / cast_window_elements",
            "Share of the elements whose low-precision copy changed over k steps.",
            needs=("cast_window_changed", "cast_window_elements"),
            finish=ratio,
            label="format/steps",
        ),
        Metric(
            "cast_recoded_window_ratio",
            "Codes changed over a window",
            "share",
            "cast_window_recoded / cast_window_elements",
            "The same over k steps.",
            needs=("cast_window_recoded", "cast_window_elements"),
            finish=ratio,
            label="format/steps",
        ),
        Metric(
            "cast_edq_window_ratio",
            "EDQ of the copy over a window",
            "ratio",
            "Σ U·C / Σ U², C = the change of the copy over k steps",
            "Share of the descent intended over k steps that a low-precision copy of the weights has made.",
            needs=("cast_window_effective_sum", "cast_window_squared_sum"),
            finish=ratio,
            label="format/steps",
            ideal=1.0,
        ),
        Metric(
            "cast_route_ratio",
            "Codes that differ by route",
            "share",
            "cast_route_differing / cast_route_elements",
            "Share of the codes that differ between two routes to one format, from the same weights.",
            needs=("cast_route_differing", "cast_route_elements"),
            finish=ratio,
            label="routes",
        ),
        Metric(
            "cast_sync_ratio",
            "Delta of a weight sync",
            "share",
            "(codes changed + scales changed, with their places) / (all codes + all scales), in bytes",
            "Forecast for copies that are sent after each step: bytes of what changed over bytes of all. Above 1 "
            "it is cheaper to send all.",
            needs=("cast_elements", "cast_changed"),
            optional=("cast_recoded", "cast_rescaled"),
            finish=_sync_ratio,
            finish_takes_label=True,
            label="format",
        ),
        Metric(
            "cast_sync_bytes",
            "Bytes of a weight sync",
            "bytes",
            "(codes changed + scales changed, with their places) in bytes / measured_steps",
            "Forecast for copies that are sent after each step: bytes of what changed.",
            needs=("cast_elements", "cast_changed", "measured_steps"),
            optional=("cast_recoded", "cast_rescaled"),
            finish=_sync_bytes,
            finish_takes_label=True,
            label="format",
        ),
        Metric(
            "cast_sync_window_ratio",
            "Delta of a weight sync over a window",
            "share",
            "(codes changed + scales changed, with their places) / (all codes + all scales), in bytes",
            "The same for copies that are sent every k steps.",
            needs=("cast_window_elements", "cast_window_changed"),
            optional=("cast_window_recoded", "cast_window_rescaled"),
            finish=_sync_ratio,
            finish_takes_label=True,
            label="format/steps",
        ),
        Metric(
            "cast_sync_window_bytes",
            "Bytes of a weight sync over a window",
            "bytes",
            "(codes changed + scales changed, with their places) in bytes",
            "Forecast for copies that are sent every k steps: bytes of what changed.",
            needs=("cast_window_elements", "cast_window_changed"),
            optional=("cast_window_recoded", "cast_window_rescaled"),
            finish=_sync_window_bytes,
            finish_takes_label=True,
            label="format/steps",
        ),
    ),
)
