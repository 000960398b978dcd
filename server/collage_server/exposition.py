"""/metrics: the page that Prometheus reads, and the samples that the server's own alerts evaluate.

It has the running runs, at most fifteen series each while all is well, and the server about itself. Values are of
the newest measured step as the background thread has written it (`collage_server.newest`), so that every process
answers the same. A run that it has not come to is not shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import __version__
from collage_monitor.judgement import longest_window
from collage_monitor.metrics import preferred_state
from collage_monitor.strategies import STRATEGIES
from collage_monitor.wire import Number
from collage_server.alerts.evaluation import Sample
from collage_server.api.answers import describes
from collage_server.app_state import AppState, app_state_of
from collage_server.auth.bearer import principal_of
from collage_server.newest import kept_newest
from collage_server.store import NewestPoint, RunQuery, RunRecord

__all__ = ["MODEL_GAUGES", "RUN_GAUGES", "SCALAR_GAUGES", "exposition", "router", "samples"]

router = APIRouter(tags=["operation"])
_PAGE: Final = 500
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
    "expectations_broken": "Expectations of this launch that do not hold; absent where nothing is expected.",
    "resume_losses": "Kinds of what an optimizer keeps that did not come through a resume; absent where all did.",
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


@router.get("/metrics", **describes(None))
def metrics(request: Request) -> Response:
    """Running runs in the Prometheus text format, those of the token's projects."""
    text = exposition(app_state_of(request), principal_of(request).projects)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def exposition(app_state: AppState, projects: Collection[str] | None = None) -> bytes:
    """The whole page, in a registry of its own; for some projects, their runs alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(app_state, projects))
    if projects is None:
        registry.register(_ServerCollector(app_state))
    return generate_latest(registry)


def samples(app_state: AppState) -> Iterator[Sample]:
    """What the page shows, as the alerts' evaluation takes it."""
    for collector in (_RunCollector(app_state, None), _ServerCollector(app_state)):
        for family in collector.collect():
            for sample in family.samples:
                yield Sample(sample.name, tuple(sorted(sample.labels.items())), float(sample.value))


class _RunCollector(Collector):
    """Runs that are running and not stale."""

    def __init__(self, app_state: AppState, projects: Collection[str] | None) -> None:
        self._app_state = app_state
        self._projects = projects

    def collect(self) -> Iterable[Metric]:
        families, store, now = _RunGauges(), self._app_state.store, self._app_state.clock()
        mismatches = store.sealing.mismatches_by_run()
        for records in self._running():
            run_ids = [record.run_id for record in records]
            findings = store.overviews.findings(run_ids)
            with store.points.snapshot() as snapshot:
                points = kept_newest(snapshot, run_ids)
            for record in records:
                run_id = record.run_id
                if run_id in points:
                    families.add(record, points[run_id], now, mismatches.get(run_id, 0), findings.get(run_id, {}))
        return families.all()

    def _running(self) -> Iterator[list[RunRecord]]:
        cursor: str | None = None
        while True:
            query = RunQuery(projects=self._projects, state="running", cursor=cursor, limit=_PAGE)
            stale_after = self._app_state.settings.stale_after_seconds
            page = self._app_state.store.runs.page(query, self._app_state.clock(), stale_after)
            yield page.runs
            cursor = page.cursor
            if cursor is None:
                return


class _ServerCollector(Collector):
    """The server about itself."""

    def __init__(self, app_state: AppState) -> None:
        self._counters = app_state.counters
        self._store = app_state.store
        self._guard = app_state.guard
        self._archiver = app_state.archiver
        self._rounds = app_state.alert_rounds

    def collect(self) -> Iterable[Metric]:
        for family in self._counters.registry.collect():
            # When a counter was made is a series that nobody asks for.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        mismatches = GaugeMetricFamily(
            "collage_server_replica_mismatches",
            "Layers and steps at which ranks that should hold the same weights did not, over all runs.",
        )
        mismatches.add_metric([], self._store.sealing.replica_mismatches())
        left = GaugeMetricFamily(
            "collage_server_disk_left_ratio",
            "Share of the room for data that is left, of the disk's or of its budget's, whichever is less.",
        )
        _add_defined(left, [], self._guard.left_ratio)
        archived = GaugeMetricFamily("collage_server_archived_bytes", "What all archived files take.")
        archived.add_metric([], self._store.archived_bytes())
        away = GaugeMetricFamily(
            "collage_server_archive_away_seconds",
            "For how long the archive has taken no files; absent where nothing is archived.",
        )
        _add_defined(away, [], None if self._archiver is None else self._archiver.away_seconds)
        evaluated = GaugeMetricFamily(
            "collage_server_alerts_evaluated_timestamp_seconds",
            "When a server on this database last evaluated the alerts, in Unix time; absent where none does.",
        )
        _add_defined(evaluated, [], self._rounds.evaluated_at)
        build = GaugeMetricFamily("collage_server_build_info", "Version of this server.", labels=("version",))
        build.add_metric([__version__], 1)
        yield from (mismatches, left, archived, away, evaluated, build)


class _RunGauges:
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
            _add_defined(self._decrement, [*labels, state.removeprefix(_DECREMENT)], model[state])
        window = longest_window(model, _WINDOW)
        if window is not None and record.strategy in STRATEGIES and STRATEGIES[record.strategy].stochastic:
            _add_defined(self._window, [*labels, str(window[0])], window[1])
        for key, value in findings.items():
            if key == _LOST or (key not in MODEL_GAUGES and not key.startswith(_DECREMENT)):
                _add_defined(self._finding, [*labels, key], value)
        for place, layer in enumerate([] if point is None else point.worst, start=1):
            _add_defined(self._worst, [*labels, str(place)], layer.value)

    def all(self) -> list[Metric]:
        """Every family, in a fixed order."""
        return [*self._gauges.values(), self._decrement, self._window, self._finding, self._worst]

    def _set(self, name: str, labels: list[str], value: Number | None) -> None:
        _add_defined(self._gauges[name], labels, value)


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


def _add_defined(family: GaugeMetricFamily, labels: list[str], value: Number | None) -> None:
    """An undefined value has no sample; it is never 0."""
    if value is not None:
        family.add_metric(labels, float(value))
