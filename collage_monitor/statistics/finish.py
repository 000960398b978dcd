"""Finishing: ratios, norms and histogram readings from merged totals. Undefined is NaN here, null on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from collage_monitor.metrics import METRICS, metric, split_key
from collage_monitor.statistics.histogram import histogram_counts, histogram_quantile, share_below_half_gap
from collage_monitor.statistics.intervals import INTERVAL_PAIRS, denominator, interval

__all__ = ["finish", "finish_all", "metric_keys"]

Array = NDArray[np.float64]
Totals = Mapping[str, Array]


def finish(key: str, totals: Totals) -> Array:
    """The metric `key` of merged totals, elementwise over their common shape; NaN where it is undefined.

    Raises:
        CatalogueError: no such metric, or a wrong label.
    """
    metric(key)
    name, label = split_key(key)
    try:
        return _FINISHERS[name](totals, label)
    except (KeyError, StopIteration):
        shape = np.shape(next(iter(totals.values()))) if totals else ()
        return np.full(shape, np.nan)


def metric_keys(statistics: Iterable[str]) -> list[str]:
    """Keys of all metrics that statistics with these keys can make, in the order of the catalogue."""
    labels: dict[str, list[str]] = {}
    for key in statistics:
        name, label = split_key(key)
        labels.setdefault(name, []).append(label or "")
    keys = []
    for name, entry in METRICS.items():
        needed = _NEEDS.get(name, (name,))
        if all(need in labels for need in needed):
            keys += [f"{name}/{label}" for label in labels[needed[0]]] if entry.label else [name]
    return keys


def finish_all(totals: Totals, *, intervals: bool = True) -> dict[str, Array]:
    """Every metric that the totals can make; 95 % intervals stand beside theirs as NAME_low, NAME_high."""
    finished = {}
    for key in metric_keys(totals):
        finished[key] = finish(key, totals)
        if intervals and key in INTERVAL_PAIRS and f"variance_numerator/{key}" in totals:
            finished[f"{key}_low"], finished[f"{key}_high"] = interval(key, totals)
    return finished


def _ratio(numerator: Array, under: Array) -> Array:
    numerator, under = np.asarray(numerator, dtype=np.float64), np.asarray(under, dtype=np.float64)
    quotient: Array = np.divide(numerator, under, out=np.full(under.shape, np.nan), where=under != 0)
    return quotient + 0.0  # −0 / −x is a plain zero to its readers


def _root_ratio(numerator: Array, under: Array) -> Array:
    return np.sqrt(_ratio(numerator, under))


def _pair(name: str) -> Callable[[Totals, str | None], Array]:
    a, b = INTERVAL_PAIRS[name]
    return lambda totals, _label: _ratio(totals[a], denominator(totals, b))


def _per_step_norm(name: str) -> Callable[[Totals, str | None], Array]:
    return lambda totals, _label: _root_ratio(totals[name], totals["measured_steps"])


def _total(name: str) -> Callable[[Totals, str | None], Array]:
    return lambda totals, _label: np.asarray(totals[name], dtype=np.float64)


def _edq(totals: Totals, _label: str | None) -> Array:
    norm = np.sqrt(totals["intended_squared_sum"] * totals["measured_steps"])
    return _ratio(totals["intended_effective_sum"], norm)


def _edq_cosine(totals: Totals, _label: str | None) -> Array:
    norms = np.sqrt(totals["intended_squared_sum"]) * np.sqrt(totals["effective_squared_sum"])
    return _ratio(totals["intended_effective_sum"], norms)


def _unchanged(totals: Totals, _label: str | None) -> Array:
    return _ratio(totals["unchanged"], totals["elements"] - totals["nonfinite"])


def _state_decrement(totals: Totals, label: str | None) -> Array:
    observed = totals[f"state_decrement_observed_sum/{label}"]
    return _ratio(observed, totals[f"state_decrement_intended_sum/{label}"])


def _update_to_weight(totals: Totals, _label: str | None) -> Array:
    step = _root_ratio(totals["intended_squared_sum"], totals["measured_steps"])
    return _ratio(step, np.sqrt(totals["parameter_squared_sum"]))


def _half_ulp_margin(totals: Totals, _label: str | None) -> Array:
    return histogram_quantile(histogram_counts(totals), 0.5) + 1.0


def _half_ulp_lr_factor(totals: Totals, _label: str | None) -> Array:
    return np.exp2(-1.0 - histogram_quantile(histogram_counts(totals), 0.1))


_WINDOWS: dict[str, tuple[str, ...]] = {
    "edq_window_ratio": ("window_intended_effective_sum", "window_intended_squared_sum"),
    "edq_window_cosine": (
        "window_intended_effective_sum",
        "window_intended_squared_sum",
        "window_effective_squared_sum",
    ),
    "lost_window_ratio": ("window_lost", "window_active"),
    "edq_visible_window_ratio": ("window_intended_visible_sum", "window_intended_squared_sum"),
    "edq_visible_window_cosine": (
        "window_intended_visible_sum",
        "window_intended_squared_sum",
        "window_visible_squared_sum",
    ),
    "lost_visible_window_ratio": ("window_lost_visible", "window_active"),
}
"""Window metric → numerator, then its denominator or the two squares whose roots' product is."""


def _over_window(numerator: str, *under: str) -> Callable[[Totals, str | None], Array]:
    def finisher(totals: Totals, label: str | None) -> Array:
        amounts = [totals[f"{name}/{label}"] for name in under]
        product = amounts[0] if len(amounts) == 1 else np.sqrt(amounts[0]) * np.sqrt(amounts[1])
        return _ratio(totals[f"{numerator}/{label}"], product)

    return finisher


_FINISHERS: dict[str, Callable[[Totals, str | None], Array]] = {
    **{name: _pair(name) for name in INTERVAL_PAIRS},
    "edq": _edq,
    "edq_cosine": _edq_cosine,
    "unchanged_ratio": _unchanged,
    "state_decrement_ratio": _state_decrement,
    **{name: _over_window(*needed) for name, needed in _WINDOWS.items()},
    "counterfactual_edq_ratio": lambda t, label: _ratio(
        t[f"counterfactual_kept_sum/{label}"], t["counterfactual_squared_sum"]
    ),
    "counterfactual_variance_ratio": lambda t, label: _ratio(
        t[f"counterfactual_variance_sum/{label}"], t["counterfactual_squared_sum"]
    ),
    "state_zero_ratio": lambda t, label: _ratio(t[f"state_zero/{label}"], t["gradient_nonzero"]),
    "decay_ratio": lambda t, _: _ratio(t["decay_kept_sum"], t["decay_squared_sum"]),
    "residual_fill_ratio": lambda t, _: _ratio(t["residual_fill_sum"], t["residual_elements"]),
    "residual_zero_ratio": lambda t, _: _ratio(t["residual_zero"], t["residual_elements"]),
    "oracle_step_norm_ratio": lambda t, _: _root_ratio(t["oracle_intended_squared_sum"], t["oracle_squared_sum"]),
    "oracle_displacement_ratio": lambda t, _: _ratio(
        t["oracle_displacement_effective_sum"], t["oracle_displacement_squared_sum"]
    ),
    "oracle_drift_ratio": lambda t, _: _root_ratio(
        t["oracle_drift_squared_sum"], t["oracle_displacement_squared_sum"]
    ),
    "grad_norm": _per_step_norm("gradient_squared_sum"),
    "param_norm": lambda t, _: np.sqrt(t["parameter_squared_sum"]),
    "intended_norm": _per_step_norm("intended_squared_sum"),
    "effective_norm": _per_step_norm("effective_squared_sum"),
    "update_to_weight_ratio": _update_to_weight,
    "predicted_plain_lost_ratio": lambda t, _: share_below_half_gap(histogram_counts(t)),
    "half_ulp_margin": _half_ulp_margin,
    "half_ulp_lr_factor": _half_ulp_lr_factor,
    "nonfinite_grads": _total("nonfinite_gradients"),
    "nonfinite_params": _total("nonfinite_parameters"),
    **{
        name: _total(name)
        for name in (
            "elements",
            "sampled",
            "nonfinite",
            "idle",
            "stray",
            "lost",
            "distorted",
            "reversed",
            "faithful",
            "oracle_steps",
            "residual_nonfinite",
        )
    },
}

_NEEDS: dict[str, tuple[str, ...]] = {
    "edq_ratio": ("intended_effective_sum", "intended_squared_sum"),
    "edq": ("intended_effective_sum", "intended_squared_sum", "measured_steps"),
    "edq_cosine": ("intended_effective_sum", "intended_squared_sum", "effective_squared_sum"),
    "edq_visible_ratio": ("intended_visible_sum", "intended_squared_sum"),
    "lost_update_ratio": ("lost", "elements", "nonfinite", "idle"),
    "lost_visible_ratio": ("lost_visible", "elements", "nonfinite", "idle"),
    "unchanged_ratio": ("unchanged", "elements", "nonfinite"),
    "state_decrement_ratio": ("state_decrement_observed_sum", "state_decrement_intended_sum"),
    **_WINDOWS,
    "counterfactual_edq_ratio": ("counterfactual_kept_sum", "counterfactual_squared_sum"),
    "counterfactual_variance_ratio": ("counterfactual_variance_sum", "counterfactual_squared_sum"),
    "state_zero_ratio": ("state_zero", "gradient_nonzero"),
    "decay_ratio": ("decay_kept_sum", "decay_squared_sum"),
    "residual_fill_ratio": ("residual_fill_sum", "residual_elements"),
    "residual_zero_ratio": ("residual_zero", "residual_elements"),
    "edq_oracle_ratio": ("oracle_effective_sum", "oracle_squared_sum"),
    "oracle_step_norm_ratio": ("oracle_intended_squared_sum", "oracle_squared_sum"),
    "oracle_displacement_ratio": ("oracle_displacement_effective_sum", "oracle_displacement_squared_sum"),
    "oracle_drift_ratio": ("oracle_drift_squared_sum", "oracle_displacement_squared_sum"),
    "grad_norm": ("gradient_squared_sum", "measured_steps"),
    "param_norm": ("parameter_squared_sum",),
    "intended_norm": ("intended_squared_sum", "measured_steps"),
    "effective_norm": ("effective_squared_sum", "measured_steps"),
    "update_to_weight_ratio": ("intended_squared_sum", "measured_steps", "parameter_squared_sum"),
    "predicted_plain_lost_ratio": ("update_ulp_histogram",),
    "half_ulp_margin": ("update_ulp_histogram",),
    "half_ulp_lr_factor": ("update_ulp_histogram",),
    "nonfinite_grads": ("nonfinite_gradients",),
    "nonfinite_params": ("nonfinite_parameters",),
}
"""Metric → statistics that it is made from; a metric not listed is the total of the same name."""
