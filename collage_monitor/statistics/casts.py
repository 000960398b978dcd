"""Casts: what of an update reaches a low-precision copy of the weights, for the forward pass or for a sampler."""

from __future__ import annotations

from typing import Final

from collage_monitor.definitions import Definition, Metric, Statistic, ratio, sums

__all__ = ["DEFINITION", "FORMATS"]

FORMATS: Final = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4")
"""What copies can be kept in; docs/metrics.md has their arithmetic."""


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
        _window("cast_window_squared_sum", "weight²", "Σ U² of the elements whose copy is known."),
        _window("cast_window_effective_sum", "weight²", "Σ U·C, C = the copy now − the copy then."),
    ),
    metrics=(
        Metric(
            "cast_changed_ratio",
            "Copies changed",
            "ratio",
            "cast_changed / cast_elements",
            "Share of the elements whose low-precision copy is another number after the step: what a sampler sees.",
            needs=("cast_changed", "cast_elements"),
            finish=ratio,
            label="format",
        ),
        Metric(
            "cast_recoded_ratio",
            "Codes changed",
            "ratio",
            "cast_recoded / cast_elements",
            "Share of the elements whose number changed in a copy with scales (MXFP8, NVFP4), before it is scaled.",
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
            "ratio",
            "cast_window_changed / cast_window_elements",
            "Share of the elements whose low-precision copy changed over k steps.",
            needs=("cast_window_changed", "cast_window_elements"),
            finish=ratio,
            label="format/steps",
        ),
        Metric(
            "cast_recoded_window_ratio",
            "Codes changed over a window",
            "ratio",
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
    ),
)
