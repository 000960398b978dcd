"""What was sent of each run, as numpy fp64: points by step and layer, logged scalars, and ratios of their sums.

Nothing here is the product's but the decoding of messages. A ratio is a sum over another, over the steps and layers
in question; what a newer attempt did again hides what was there.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from collage_monitor import wire

RATIOS = {
    "edq_ratio": ("intended_effective_sum", "intended_squared_sum"),
    "edq_oracle_ratio": ("oracle_effective_sum", "oracle_squared_sum"),
    "oracle_displacement_ratio": ("oracle_displacement_effective_sum", "oracle_displacement_squared_sum"),
    "decay_ratio": ("decay_kept_sum", "decay_squared_sum"),
    "residual_dropped_ratio": ("residual_dropped", "residual_elements"),
    "residual_zero_ratio": ("residual_zero", "residual_elements"),
    "residual_fill_ratio": ("residual_fill_sum", "residual_elements"),
    "state_decrement_ratio": ("state_decrement_observed_sum", "state_decrement_intended_sum"),
    "average_edq_ratio": ("average_effective_sum", "average_squared_sum"),
    "average_lost_ratio": ("average_lost", "average_active"),
    "average_moved_ratio": ("average_moved", "average_elements"),
}
"""Metric → its sums, over which it is a ratio; their label, if any, is the metric's."""
NORMS = {"grad_norm": "gradient_squared_sum", "intended_norm": "intended_squared_sum"}
"""Root mean squares over steps."""
OCTAVES = range(-24, 8)
OF_THE_LAST_STEP = ("residual_", "oracle_displacement", "oracle_steps", "average_moved", "average_elements")
"""Statistics of which the last measured step counts."""
AT_MOST = {"nonfinite_params": "nonfinite_parameters", "residual_nonfinite": "residual_nonfinite"}
"""Counts of which the largest of the steps counts."""


class RawRun:
    """A run as it was sent."""

    def __init__(self, run_id: str, envelopes: Iterable[Any]) -> None:
        sent = [envelope for envelope in envelopes if envelope.run_id == run_id]

        def of_kind(kind: str) -> list[Any]:
            return [entry for entry in sent if entry.kind == kind]

        self.run_id = run_id
        self.created: wire.RunCreate = of_kind("run")[0].body
        self.project: str = of_kind("run")[0].project
        launches = {entry.body.launch_id: entry.body.first_step for entry in of_kind("attempt")}
        self.begins = list(launches.values())
        streams = {entry.stream_id: entry.body for entry in of_kind("stream")}
        self.watch: wire.WatchInfo = [entry.body.watch for entry in of_kind("stream") if entry.body.watch][-1]
        declared = next(reversed(streams.values()))
        self.layers = [layer.name for layer in declared.layers]
        self.sizes = {layer.name: layer.elements for layer in declared.layers}
        order = list(launches)
        self._places = {layer: place for place, layer in enumerate(self.layers)}
        self._known: dict[Any, float] = {}
        self.points: dict[int, dict[str, np.ndarray]] = {}
        self.scalars: dict[str, dict[int, float]] = {}
        for attempt, launch in enumerate(order):
            own = [entry for entry in of_kind("reports") if streams[entry.stream_id].launch_id == launch]
            until = min((launches[later] for later in order[attempt + 1 :]), default=np.inf)
            for entry in own:
                for report in entry.body.reports:
                    if report.step < until:
                        self._keep(report, streams[entry.stream_id].statistics)
        self.steps = sorted(self.points)
        self.last_step = max([*self.steps, *(step for own in self.scalars.values() for step in own)])

    def _keep(self, report: wire.Report, names: Sequence[str]) -> None:
        for name, value in report.scalars.items():
            self.scalars.setdefault(name, {})[report.step] = float(value)
        if report.statistics is None:
            return
        assert report.step not in self.points, "a step was reported twice: it would have to be merged"
        table = np.frombuffer(report.statistics, dtype="<f8").reshape(report.statistic_count, report.layer_count)
        self.points[report.step] = dict(zip(names, table.astype(np.float64), strict=False))

    def total(self, name: str, steps: Sequence[int], layers: Iterable[str] | None = None) -> float:
        """A statistic's sum over steps and layers; NaN if nothing reported it."""
        places = slice(None) if layers is None else [self._places[layer] for layer in layers]
        if name.startswith(OF_THE_LAST_STEP):
            steps = [step for step in steps if name in self.points[step]][-1:]
        found = [self.points[step][name][places] for step in steps if name in self.points[step]]
        whole = np.array(found)
        return float(np.nansum(whole)) if found and np.isfinite(whole).any() else float("nan")

    def metric(self, key: str, steps: Sequence[int], layers: Iterable[str] | None = None) -> float:
        """A measured metric over steps and layers; NaN where it is undefined."""
        asked = (key, tuple(steps), layers if layers is None else tuple(layers))
        if asked not in self._known:
            self._known[asked] = self._metric(*asked)
        return self._known[asked]

    def _metric(self, key: str, steps: Sequence[int], layers: Iterable[str] | None) -> float:
        name, _, label = key.partition("/")
        if name == "lost_update_ratio":
            active = [self.total(part, steps, layers) for part in ("lost", "distorted", "faithful")]
            return quotient(active[0], sum(active))
        if name in NORMS:
            squares = [self.total(NORMS[name], [step], layers) for step in steps]
            return float(np.sqrt(np.nanmean(squares)))
        if name == "param_norm":
            return float(np.sqrt(self.total("parameter_squared_sum", steps[-1:], layers)))
        if name == "update_to_weight_ratio":
            return quotient(self.metric("intended_norm", steps, layers), self.metric("param_norm", steps, layers))
        if name == "oracle_steps":
            return float(max(self.points[steps[-1]]["oracle_steps"]))
        if name == "residual_dropped_ratio":  # Dropped once, a residual is gone: the largest of the steps counts.
            dropped = [self.total("residual_dropped", [step], layers) for step in steps]
            known = [own for own in dropped if not np.isnan(own)]
            return quotient(max(known, default=np.nan), self.total("residual_elements", steps, layers))
        if name in AT_MOST:
            return max(self.total(AT_MOST[name], [step], layers) for step in steps)
        if name == "half_ulp_margin":
            return self.margin(steps, layers)
        over, under = (f"{part}/{label}" if label else part for part in RATIOS[name])
        return quotient(self.total(over, steps, layers), self.total(under, steps, layers))

    def margin(self, steps: Sequence[int], layers: Iterable[str] | None = None) -> float:
        """The median of log₂(|u| / ½ gap) of what is not idle: linear in log₂ inside an octave [2ᵏ, 2ᵏ⁺¹) gaps."""
        names = [f"update_ulp_histogram/{label}" for label in ("underflow", *map(str, OCTAVES), "overflow")]
        counts = np.nan_to_num([self.total(name, steps, layers) for name in names])
        below, half = np.cumsum(counts), counts.sum() / 2
        place = int(np.searchsorted(below, half))
        if not half:
            return float("nan")
        if not 0 < place < len(names) - 1:  # Beyond the octaves: the nearest bound is what is known.
            return float(OCTAVES[-1] + 2 if place else OCTAVES[0] + 1)
        return float(OCTAVES[place - 1] + (half - below[place - 1]) / counts[place] + 1)

    def curve(self, key: str, layers: Iterable[str] | None = None) -> dict[int, float]:
        """The metric at each measured step."""
        chosen = None if layers is None else list(layers)
        return {step: self.metric(key, [step], chosen) for step in self.steps}

    @cached_property
    def recent(self) -> list[int]:
        """The recent past since the last launch or change of what is kept: the newest 32 measured steps, or as many
        more as hold a twentieth of Σ u²."""
        since = max(begin for begin in (self.begins[-1], self.watch.kept_since or 0) if begin <= self.steps[-1])
        steps = [step for step in self.steps if step >= since]
        squares = [np.nan_to_num(self.total("intended_squared_sum", [step])) for step in steps]
        for taken in range(min(32, len(squares)), len(squares)):
            if sum(squares[-taken:]) >= 0.05 * sum(squares):
                return steps[-taken:]
        return steps

    def missing(self, layer: str, steps: Sequence[int]) -> float:
        """Σ u² − Σ u·e of a layer, where it is positive."""
        lost = self.total("intended_squared_sum", steps, [layer]) - self.total(
            "intended_effective_sum", steps, [layer]
        )
        return max(float(np.nan_to_num(lost)), 0.0)

    def share_of_loss(self, layer: str, steps: Sequence[int]) -> float:
        """The layer's part of what the model loses."""
        return self.missing(layer, steps) / sum(self.missing(name, steps) for name in self.layers)

    def share_of_squares(self, layers: Iterable[str], steps: Sequence[int]) -> float:
        """The layers' part of Σ u²."""
        return self.total("intended_squared_sum", steps, layers) / self.total("intended_squared_sum", steps)

    def share_of_elements(self, layers: Iterable[str]) -> float:
        """The layers' part of the model's elements."""
        return float(sum(self.sizes[layer] for layer in layers) / sum(self.sizes.values()))

    def losing_layers(self, steps: Sequence[int]) -> list[str]:
        """Layers that lose more than half of their updates."""
        return [layer for layer in self.layers if self.metric("lost_update_ratio", steps, [layer]) > 0.5]

    def newest(self, name: str) -> tuple[int, float]:
        """(step, value) of a scalar's newest entry."""
        step = max(self.scalars[name])
        return step, self.scalars[name][step]


def quotient(over: float, under: float) -> float:
    """over / under; NaN where there is nothing to divide by."""
    return over / under if under else float("nan")


def runs_of(envelopes: Sequence[Any], run_ids: Iterable[str]) -> dict[str, RawRun]:
    """The runs by name."""
    return {run.created.name or "": run for run in (RawRun(run_id, envelopes) for run_id in run_ids)}
