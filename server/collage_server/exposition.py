"""/metrics: the page that Prometheus reads, and the samples that the server's own alerts evaluate.

It has the running runs, at most fifteen series each while all is well, and the server about itself. Values are of
the newest measured step as a background thread wrote it (`summariser.py`), so that every process answers the
same. A run that the thread has not reached yet is not shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as PrometheusSample
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import __version__
from collage_monitor.diagnosis import longest_window
from collage_monitor.metrics import preferred_state
from collage_monitor.strategies import STRATEGIES
from collage_monitor.wire import Number
from collage_server.alerts.condition_evaluation import Labels, Sample
from collage_server.api.responses import describes
from collage_server.app_state import AppState, app_state_of
from collage_server.auth.bearer import principal_of
from collage_server.clock import DatabaseClock
from collage_server.memory_budget import PROCESS_BYTES
from collage_server.store import LiveRun, NewestPoint, ReportedState
from collage_server.store.backup import newest_backup

__all__ = ["MODEL_GAUGES", "RUN_GAUGES", "SCALAR_GAUGES", "exposition", "router", "samples"]

router = APIRouter(tags=["operation"])
_PAGE: Final = 500
_DECREMENT: Final = "state_decrement_ratio/"
_WINDOW: Final = "lost_window_ratio"
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
    "expectations_broken": "Expectations of this launch that do not hold; absent where nothing is expected.",
    "resume_losses": "Kinds of what an optimizer keeps that did not come through a resume; absent where all did.",
    "skipped_steps": "Steps that the loss scaler skipped; absent without a scaler.",
}
RUN_GAUGES: Final = {
    "step": "Newest step reported.",
    "last_report_timestamp_seconds": "When the newest report was stored, in Unix time.",
    "reports_dropped": "Reports that the agents gave up, over all ranks.",
    "steps_since_resume": "Steps since the newest resume began; absent before a first one.",
    "intended_share": "Newest intended update's norm over the usual one of the run's last fifth; absent at first.",
    "unmeasured_seconds": "Age of a run of which no step was measured; absent for all others.",
    "replica_mismatches": "Layers and steps of the newest attempt at which replicas differ; absent where none do.",
}


@router.get("/metrics", **describes(None))
def metrics(request: Request) -> Response:
    """Running runs of the token's projects in the Prometheus text format."""
    text = exposition(app_state_of(request), principal_of(request).projects)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def exposition(app_state: AppState, projects: Collection[str] | None = None) -> bytes:
    """The whole page, in a registry of its own; for some projects, their runs alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(app_state, projects))
    if projects is None:
        registry.register(_ServerCollector(app_state))
    return generate_latest(registry)


def samples(app_state: AppState, names: Collection[str] | None = None) -> Iterator[Sample]:
    """The samples of the page, for the evaluation of alerts; `names` limits the series of runs (None: all)."""
    yield from itertools.chain.from_iterable(_gauges_of_runs(app_state, None, names).samples())
    for family in _ServerCollector(app_state).collect():
        for sample in family.samples:
            yield Sample(sample.name, tuple(sorted(sample.labels.items())), float(sample.value))


def _gauges_of_runs(
    app_state: AppState, projects: Collection[str] | None, names: Collection[str] | None = None
) -> _RunGauges:
    """Those of the live runs of these projects, of one moment."""
    gauges, store, now = _RunGauges(names), app_state.store, app_state.clock()
    mismatches = store.sealing.mismatches_by_run()
    with store.points.snapshot() as snapshot:
        after = None
        while True:
            page = snapshot.live_runs(projects, now, after, _PAGE)
            for run in page.runs:
                gauges.add(run, now, mismatches.get(run.run_id, 0))
            after = page.after
            if after is None:
                return gauges


class _RunCollector(Collector):
    """Runs that are running and not stale."""

    def __init__(self, app_state: AppState, projects: Collection[str] | None) -> None:
        self._app_state = app_state
        self._projects = projects

    def collect(self) -> Iterable[Metric]:
        gauges = _gauges_of_runs(self._app_state, self._projects)
        for (name, text), known in zip(_GAUGES.items(), gauges.samples(), strict=True):
            family = Metric(name, text, "gauge")
            family.samples = [PrometheusSample(name, dict(labels), value) for _, labels, value in known]
            yield family


class _ServerCollector(Collector):
    """The server about itself."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state

    def collect(self) -> Iterable[Metric]:
        for family in self._app_state.counters.registry.collect():
            # Leave out the times at which counters were created.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        for name, (text, value, *label) in self._gauges().items():
            gauge = GaugeMetricFamily(f"collage_server_{name}", text, labels=label)
            for key, number in (value if isinstance(value, dict) else {"": value}).items():
                # An undefined value has no sample; it is never 0.
                if number is not None:
                    gauge.add_metric([key] if label else [], float(number))
            yield gauge

    def _held(self) -> dict[str, float | None]:
        """Bytes by owner."""
        app_state, memory = self._app_state, self._app_state.memory
        return {
            "process": PROCESS_BYTES,
            "bodies": memory.bodies.bytes + memory.bodies.arriving,
            "caches": app_state.answers.bytes + app_state.store.points.cached_bytes,
            **{owner: memory.held[owner] for owner in ("answers", "evaluations", "sealing")},
        }

    def _gauges(self) -> dict[str, tuple[Any, ...]]:
        """The server's gauges: name → (text, value), or (text, values by label, the label's name)."""
        app_state, clock = self._app_state, self._app_state.clock
        newest = newest_backup(app_state.settings.folder)
        return {
            "replica_mismatches": (
                "Layers and steps at which ranks that should hold the same weights did not, over all runs.",
                app_state.store.sealing.replica_mismatches(),
            ),
            "disk_left_ratio": (
                "Share of the room for data that is left, of the disk's or of its budget's, whichever is less.",
                app_state.guard.left_ratio,
            ),
            "archived_bytes": ("The size of all archived files.", app_state.guard.archived_bytes),
            "archive_away_seconds": (
                "For how long the archive has taken no files; absent where nothing is archived.",
                None if app_state.archiver is None else app_state.archiver.away_seconds,
            ),
            "archive_damaged_files": (
                "Archived files that are missing or damaged, without a good copy; absent without an archive.",
                None if app_state.archiver is None else app_state.archiver.damaged_files,
            ),
            "database_damaged_rows": (
                "Damaged rows of the database, of which no back-up has a good copy; absent on PostgreSQL.",
                app_state.maintenance.damaged_rows,
            ),
            "backup_age_seconds": (
                "Age of the newest good back-up of `collage-monitor backup make`; absent where it made none.",
                None if newest is None else app_state.clock() - newest.made_at,
            ),
            "dependency_away_seconds": (
                "For how long something that this server depends on has not answered; 0 while it does.",
                {entry.name: entry.away_seconds for entry in app_state.dependencies},
                "dependency",
            ),
            "alerts_evaluated_timestamp_seconds": (
                "When a server on this database last evaluated the alerts, in Unix time; absent where none does.",
                app_state.alert_rounds.evaluated_at,
            ),
            "memory_bytes": ("Memory held, as estimated before it is taken.", self._held(), "owner"),
            "memory_limit_bytes": ("Memory that the server may take.", app_state.memory.limit_bytes),
            "build_info": ("Version of this server.", {__version__: 1}, "version"),
            "alerts_lease_held": (
                "1 if this server evaluates the alerts, 0 if another one does; absent where it evaluates none.",
                app_state.alert_rounds.is_mine,
            ),
            "journal_bytes": (
                "Reports that wait to be sealed, as far as this server knows.",
                app_state.bounds.total,
            ),
            "oldest_unsealed_timestamp_seconds": (
                "When the oldest report that waits to be sealed was made, a minute ago; absent where none waits.",
                app_state.maintenance.oldest_unsealed,
            ),
            "sealer_round_timestamp_seconds": (
                "When this server last looked for reports to seal, in Unix time.",
                app_state.sealer.round_at,
            ),
            "clock_skew_seconds": (
                "By how much the database's clock is ahead of this server's; absent with SQLite, which has none.",
                clock.skew_seconds if isinstance(clock, DatabaseClock) else None,
            ),
        }


_GAUGES: Final = {
    **{f"collage_{name}": text for name, text in {**MODEL_GAUGES, **SCALAR_GAUGES, **RUN_GAUGES}.items()},
    "collage_state_decrement_ratio": (
        "Decay of the optimizer state as stored over the decay intended: 1 as it should, 0 it can only grow."
    ),
    "collage_lost_window_ratio": (
        "Share lost over the longest window watched, where one step's share misjudges stochastic rounding."
    ),
    "collage_finding": (
        "A number that speaks against the run over its recent past, and the alert that it is; absent if fine."
    ),
    "collage_worst_layer_edq_ratio": ("EDQ of the three worst layers; the worst one's series has its name."),
}
"""The families of runs, in their order on the page."""


class _RunGauges:
    """The samples of runs, being gathered, of the families called so (None: of all). A run's share their labels."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._samples: dict[str, list[Sample]] = {name: [] for name in _GAUGES}
        self._asked = {name.removeprefix("collage_") for name in _GAUGES if names is None or name in names}

    def add(self, run: LiveRun, now: float, mismatches: int) -> None:
        """One run's series at the time `now`."""
        if run.is_silent and "unmeasured_seconds" not in self._asked:
            return
        labels: Labels = (
            ("project", run.project),
            ("run", run.name),
            ("run_id", run.run_id),
            ("strategy", run.strategy or "unknown"),
        )
        for name, value in _of_run(run, now).items():
            self._set(name, labels, value)
        self._set("replica_mismatches", labels, mismatches or None)
        for name, logged in run.reported.scalars.items():
            if name in SCALAR_GAUGES:
                self._set(name, labels, logged.value)
        for finding in run.findings:
            about = {"key": finding.key, "layer": finding.layer, "alert": finding.alert}
            own = tuple(sorted([*labels, *((name, value) for name, value in about.items() if value)]))
            self._set("finding", own, finding.value)
        if run.point is not None:
            self._add_point(run.point, labels, run.strategy)

    def _add_point(self, point: NewestPoint, labels: Labels, strategy: str | None) -> None:
        for name in MODEL_GAUGES:
            self._set(name, labels, point.model.get(name))
        state = preferred_state(point.model)
        if state is not None:
            own = _with(labels, "state", state.removeprefix(_DECREMENT))
            self._set("state_decrement_ratio", own, point.model[state])
        if strategy in STRATEGIES and STRATEGIES[strategy].stochastic:
            window = longest_window(point.model, _WINDOW)
            if window is not None:
                self._set("lost_window_ratio", _with(labels, "window", str(window[0])), window[1])
        for place, layer in enumerate(point.worst, start=1):
            named = _with(labels, "layer", layer.layer) if place == 1 else labels
            self._set("worst_layer_edq_ratio", _with(named, "worst", str(place)), layer.value)

    def samples(self) -> Iterable[list[Sample]]:
        """Those of each family of `_GAUGES`."""
        return self._samples.values()

    def _set(self, name: str, labels: Labels, value: Number | None) -> None:
        """An undefined value has no sample; it is never 0."""
        if value is not None and name in self._asked:
            name = f"collage_{name}"
            self._samples[name].append(Sample(name, labels, float(value)))


def _with(labels: Labels, name: str, value: str) -> Labels:
    return tuple(sorted((*labels, (name, value))))


def _of_run(run: LiveRun, now: float) -> dict[str, float | None]:
    """RUN_GAUGES as far as the streams' reports give them."""
    reported = run.reported
    return {
        "step": reported.last_step,
        "last_report_timestamp_seconds": reported.last_report_at,
        "reports_dropped": reported.reports_dropped,
        "steps_since_resume": _steps_since_resume(reported),
        "intended_share": run.intended_share,
        "unmeasured_seconds": now - run.created_at if run.point is None else None,
    }


def _steps_since_resume(run: ReportedState) -> float | None:
    # An evaluation that is logged later is no resume; of runs that only log every launch may be one.
    begun = [entry for entry in run.attempts if entry.measured_from is not None] or run.attempts
    silent = [entry for entry in run.attempts if entry.attempt > (run.last_attempt or 0)]
    resumed = max([*begun[1:], *silent[-1:]], key=lambda entry: entry.attempt, default=None)
    if resumed is None or run.last_step is None:
        return None
    # Until the first report `last_step` is an older attempt's; 0 keeps alerts quiet while a resume settles.
    if run.last_attempt is None or run.last_attempt < resumed.attempt:
        return 0.0
    begin = resumed.first_step if resumed.measured_from is None else resumed.measured_from
    return max(0.0, float(run.last_step - begin + 1))
