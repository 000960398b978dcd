"""/healthz, /readyz and /metrics.

The page of metrics has the running runs in the Prometheus text format, at most fifteen series each, and the server
about itself. Values are those of the newest measured step, read from the store, so that every process answers the
same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import __version__, wire
from collage_monitor.wire import Number
from collage_server.api.answers import answer, describes
from collage_server.api.reading import worst_of
from collage_server.auth.bearer import principal_of
from collage_server.components import Components, components_of
from collage_server.errors import Busy, Gone, NotFound
from collage_server.queries.runs import WORST_LAYERS, latest_answer
from collage_server.store import RunQuery, RunRecord

__all__ = ["MODEL_GAUGES", "SCALAR_GAUGES", "exposition", "router"]

router = APIRouter(tags=["operation"])
_LABELS: Final = ("project", "run_id", "run", "strategy")
_PAGE: Final = 500
_DECREMENT: Final = "state_decrement_ratio/"
_PREFERRED_STATE: Final = "exp_avg_sq"
MODEL_GAUGES: Final = {
    "edq_ratio": "Share of the intended descent that arrived at the newest measured step.",
    "edq_visible_ratio": "As collage_edq_ratio, for the registered parameter.",
    "edq_oracle_ratio": "This step against an fp64 oracle.",
    "lost_update_ratio": "Share of the intended updates that were rounded away.",
    "update_to_weight_ratio": "Size of an intended step beside the weights.",
}
SCALAR_GAUGES: Final = {
    "loss": "Newest training loss.",
    "validation_loss": "Newest loss on held-out data.",
    "agent_overhead_ratio": "CPU of the agent over the rest of the training process's CPU.",
}


@router.get("/healthz", **describes(wire.Health))
async def healthz() -> Response:
    """The process answers."""
    return answer(wire.Health(status="ok", version=__version__))


@router.get("/readyz", **describes(wire.Health))
def readyz(request: Request) -> Response:
    """The database answers and the writer runs; `status` says so when the server only reads."""
    components = components_of(request)
    if not components.writer.running:
        raise Busy("the writer does not run; the server is starting or going down", retry_after_seconds=1)
    try:
        components.store.check()
    except Exception as error:
        raise Busy(f"the database does not answer ({type(error).__name__})", retry_after_seconds=5) from error
    reason = components.guard.reason
    return answer(wire.Health(status="ok" if reason is None else f"read-only: {reason}", version=__version__))


@router.get("/metrics", **describes(None))
def metrics(request: Request) -> Response:
    """Running runs in the Prometheus text format, those of the token's projects."""
    text = exposition(components_of(request), principal_of(request).projects)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def exposition(components: Components, projects: Collection[str] | None = None) -> bytes:
    """The whole page, in a registry of its own; for some projects, their runs alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(components, projects))
    if projects is None:
        registry.register(_ServerCollector(components))
    return generate_latest(registry)


class _RunCollector(Collector):
    """Runs that are running and not stale."""

    def __init__(self, components: Components, projects: Collection[str] | None) -> None:
        self._components = components
        self._projects = projects

    def collect(self) -> Iterable[Metric]:
        families = _RunGauges()
        for record in self._running():
            with suppress(Gone, NotFound):  # It was deleted since; nothing of it is shown.
                families.add(record, self._components)
        return families.all()

    def _running(self) -> Iterator[RunRecord]:
        cursor: str | None = None
        while True:
            query = RunQuery(projects=self._projects, state="running", cursor=cursor, limit=_PAGE)
            stale_after = self._components.settings.stale_after_seconds
            page = self._components.store.runs.page(query, self._components.clock(), stale_after)
            yield from page.runs
            cursor = page.cursor
            if cursor is None:
                return


class _RunGauges:
    """The gauge families of runs, being filled."""

    def __init__(self) -> None:
        self._gauges = {
            name: GaugeMetricFamily(f"collage_{name}", text, labels=_LABELS)
            for name, text in {
                **MODEL_GAUGES,
                **SCALAR_GAUGES,
                "step": "Newest step reported.",
                "last_report_timestamp_seconds": "When the newest report was stored, in Unix time.",
                "reports_dropped": "Reports that the agents gave up, over all ranks.",
            }.items()
        }
        self._decrement = GaugeMetricFamily(
            "collage_state_decrement_ratio",
            "Decay of the optimizer state as stored over the decay intended: 1 as it should, 0 it can only grow.",
            labels=(*_LABELS, "state"),
        )
        self._worst = GaugeMetricFamily(
            "collage_worst_layer_edq_ratio",
            "EDQ of the three worst layers; GET /api/v1/runs/RUN/worst names them.",
            labels=(*_LABELS, "worst"),
        )

    def add(self, record: RunRecord, components: Components) -> None:
        """One run's series."""
        labels = [record.project, record.run_id, record.name, record.strategy or "unknown"]
        with components.store.points.snapshot() as now:
            point = now.latest(record.run_id)
            worst = worst_of(now, record.run_id, point, "edq_ratio", WORST_LAYERS)
        latest = latest_answer(record, point, worst)
        for name in MODEL_GAUGES:
            self._set(name, labels, latest.model.get(name))
        for name in SCALAR_GAUGES:
            if name in latest.scalars:
                self._set(name, labels, latest.scalars[name].value)
        self._set("step", labels, record.last_step)
        self._set("last_report_timestamp_seconds", labels, record.last_report_at)
        if record.reports_dropped is not None:
            self._set("reports_dropped", labels, record.reports_dropped)
        states = [key for key in latest.model if key.startswith(_DECREMENT)]
        if states:
            preferred = _DECREMENT + _PREFERRED_STATE
            state = preferred if preferred in states else states[0]
            _add(self._decrement, [*labels, state.removeprefix(_DECREMENT)], latest.model[state])
        for place, layer in enumerate(latest.worst, start=1):
            _add(self._worst, [*labels, str(place)], layer.value)

    def all(self) -> list[Metric]:
        """Every family, in a fixed order."""
        return [*self._gauges.values(), self._decrement, self._worst]

    def _set(self, name: str, labels: list[str], value: Number | None) -> None:
        _add(self._gauges[name], labels, value)


def _add(family: GaugeMetricFamily, labels: list[str], value: Number | None) -> None:
    """An undefined value has no sample; it is never 0."""
    if value is not None:
        family.add_metric(labels, float(value))


class _ServerCollector(Collector):
    """The server about itself."""

    def __init__(self, components: Components) -> None:
        self._counters = components.counters
        self._store = components.store

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
        build = GaugeMetricFamily("collage_server_build_info", "Version of this server.", labels=("version",))
        build.add_metric([__version__], 1)
        yield from (mismatches, build)
