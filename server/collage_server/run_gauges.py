"""Gauges of running runs for /metrics: at most fifteen series each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from collage_monitor.judgement import longest_window
from collage_monitor.metrics import preferred_state
from collage_monitor.strategies import STRATEGIES
from collage_monitor.wire import Number
from collage_server.store import NewestPoint, RunRecord

__all__ = [
    "MODEL_GAUGES",
    "RUN_GAUGES",
    "SCALAR_GAUGES",
    "RunGauges",
    "add_defined",
]

_LABELS: Final = ("project", "run_id", "run", "strategy")
_DECREMENT: Final = "state_decrement_ratio/"
_WINDOW: Final = "lost_window_ratio"
_LOST: Final = "lost_update_ratio"
"""Shown as a finding, too: its gauge is one step's, and does not know who rounds at random."""
_LABELLED: Final = (_DECREMENT, _WINDOW)
MODEL_GAUGES: Final = {
    "edq_ratio": "Share of the intended descent that arrived at the newest measured step.",
    "edq_visible_ratio": "As collage_edq_ratio, for the registered parameter.",
    "edq_oracle_ratio": "This step against an fp64 oracle.",
    "lost_update_ratio": "Share of the intended updates that were rounded away.",
    "update_to_weight_ratio": "Size of an intended step beside the weights.",
    "grad_norm": "Norm of the gradient as the optimizer sees it, after clipping.",
}
SCALAR_GAUGES: Final = {
    "loss": "Newest training loss.",
    "validation_loss": "Newest loss on held-out data.",
    "agent_overhead_ratio": "CPU of the agent over the rest of the training process's CPU.",
    "grad_norm_unclipped": "Norm of the gradient before clipping, where the loop logs it.",
    "external_writes": "How often our optimizer found a weight changed by somebody else; absent where never.",
    "skipped_steps": "Steps that the loss scaler skipped; absent without a scaler.",
}
RUN_GAUGES: Final = {
    "step": "Newest step reported.",
    "last_report_timestamp_seconds": "When the newest report was stored, in Unix time.",
    "reports_dropped": "Reports that the agents gave up, over all ranks.",
    "steps_since_resume": "Steps since the newest resume began; absent before a first one.",
    "unmeasured_seconds": "Age of a run of which no step was measured; absent for all others.",
    "replica_mismatches": "Layers and steps of the newest attempt at which replicas differ; absent where none do.",
}


class RunGauges:
    """The gauge families of runs, being filled."""

    def __init__(self) -> None:
        self._gauges = {
            name: GaugeMetricFamily(f"collage_{name}", text, labels=_LABELS)
            for name, text in {**MODEL_GAUGES, **SCALAR_GAUGES, **RUN_GAUGES}.items()
        }
        self._decrement = GaugeMetricFamily(
            "collage_state_decrement_ratio",
            "Decay of the optimizer state as stored over the decay intended: 1 as it should, 0 it can only grow.",
            labels=(*_LABELS, "state"),
        )
        self._window = GaugeMetricFamily(
            "collage_lost_window_ratio",
            "Share lost over the longest window watched, where one step's share misjudges stochastic rounding.",
            labels=(*_LABELS, "window"),
        )
        self._finding = GaugeMetricFamily(
            "collage_finding",
            "A number that the judgement holds against the run over its recent past; absent if fine.",
            labels=(*_LABELS, "key"),
        )
        self._worst = GaugeMetricFamily(
            "collage_worst_layer_edq_ratio",
            "EDQ of the three worst layers; GET /api/v1/runs/RUN/worst names them.",
            labels=(*_LABELS, "worst"),
        )

    def add(
        self,
        record: RunRecord,
        point: NewestPoint | None,
        now: float,
        mismatches: int,
        findings: Mapping[str, float],
    ) -> None:
        """One run's series at the time `now`; `point`: its newest measured step, None where nothing is measured."""
        model = {} if point is None else point.model
        labels = [record.project, record.run_id, record.name, record.strategy or "unknown"]
        for name in MODEL_GAUGES:
            self._set(name, labels, model.get(name))
        for name in SCALAR_GAUGES:
            if name in record.scalars:
                self._set(name, labels, record.scalars[name].value)
        for name, value in _of_run(record, now, measured=point is not None).items():
            self._set(name, labels, value)
        self._set("replica_mismatches", labels, mismatches or None)
        state = preferred_state(model)
        if state is not None:
            add_defined(self._decrement, [*labels, state.removeprefix(_DECREMENT)], model[state])
        window = longest_window(model, _WINDOW)
        if window is not None and record.strategy in STRATEGIES and STRATEGIES[record.strategy].stochastic:
            add_defined(self._window, [*labels, str(window[0])], window[1])
        for key, value in findings.items():
            if key == _LOST or (key not in MODEL_GAUGES and not key.startswith(_DECREMENT)):
                add_defined(self._finding, [*labels, key], value)
        for place, layer in enumerate([] if point is None else point.worst, start=1):
            add_defined(self._worst, [*labels, str(place)], layer.value)

    def all(self) -> list[Metric]:
        """Every family, in a fixed order."""
        return [*self._gauges.values(), self._decrement, self._window, self._finding, self._worst]

    def _set(self, name: str, labels: list[str], value: Number | None) -> None:
        add_defined(self._gauges[name], labels, value)


def _of_run(record: RunRecord, now: float, *, measured: bool) -> dict[str, float | None]:
    """RUN_GAUGES as far as the run's record tells them."""
    # An evaluation that is logged later is no resume; of runs that only log every launch may be one.
    begun = [entry for entry in record.attempts if entry.measured_from is not None] or record.attempts
    silent = [entry for entry in record.attempts if entry.attempt > (record.last_attempt or 0)]
    resumed = max([*begun[1:], *silent[-1:]], key=lambda entry: entry.attempt, default=None)
    last_step, since_resume = record.last_step, None
    if resumed is not None and last_step is not None:
        # Before its first report `last_step` is an older attempt's; 0 keeps alerts quiet that let a resume settle.
        reported = record.last_attempt is not None and record.last_attempt >= resumed.attempt
        begin = resumed.first_step if resumed.measured_from is None else resumed.measured_from
        since_resume = max(0.0, float(last_step - begin + 1)) if reported else 0.0
    return {
        "step": last_step,
        "last_report_timestamp_seconds": record.last_report_at,
        "reports_dropped": record.reports_dropped,
        "steps_since_resume": since_resume,
        "unmeasured_seconds": None if measured else now - record.created_at,
    }


def add_defined(family: GaugeMetricFamily, labels: list[str], value: Number | None) -> None:
    """An undefined value has no sample; it is never 0."""
    if value is not None:
        family.add_metric(labels, float(value))
