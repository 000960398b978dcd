"""/healthz, /readyz and /metrics.

The page of metrics has the running runs in the Prometheus text format, at most fifteen series each while all is
well, and the server about itself. Values are those of the newest measured step as the background thread has written
it (`collage_server.newest`), so that every process answers the same. A run that it has not come to is not shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import __version__, wire
from collage_server.alerts.evaluation import Sample
from collage_server.api.answers import answer, describes
from collage_server.auth.bearer import principal_of
from collage_server.components import Components, components_of
from collage_server.errors import Busy
from collage_server.newest import kept_newest
from collage_server.run_gauges import (
    MODEL_GAUGES,
    RUN_GAUGES,
    SCALAR_GAUGES,
    RunGauges,
    add_defined,
)
from collage_server.store import RunQuery, RunRecord

__all__ = ["MODEL_GAUGES", "RUN_GAUGES", "SCALAR_GAUGES", "exposition", "router", "samples"]

router = APIRouter(tags=["operation"])
_PAGE: Final = 500


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


def samples(components: Components) -> Iterator[Sample]:
    """What the page shows, as the alerts' evaluation takes it."""
    for collector in (_RunCollector(components, None), _ServerCollector(components)):
        for family in collector.collect():
            for sample in family.samples:
                yield Sample(sample.name, tuple(sorted(sample.labels.items())), float(sample.value))


class _RunCollector(Collector):
    """Runs that are running and not stale."""

    def __init__(self, components: Components, projects: Collection[str] | None) -> None:
        self._components = components
        self._projects = projects

    def collect(self) -> Iterable[Metric]:
        families, store, now = RunGauges(), self._components.store, self._components.clock()
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
            stale_after = self._components.settings.stale_after_seconds
            page = self._components.store.runs.page(query, self._components.clock(), stale_after)
            yield page.runs
            cursor = page.cursor
            if cursor is None:
                return


class _ServerCollector(Collector):
    """The server about itself."""

    def __init__(self, components: Components) -> None:
        self._counters = components.counters
        self._store = components.store
        self._guard = components.guard

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
        add_defined(left, [], self._guard.left_ratio)
        build = GaugeMetricFamily("collage_server_build_info", "Version of this server.", labels=("version",))
        build.add_metric([__version__], 1)
        yield from (mismatches, left, build)
