"""docs/architecture.md draws two paths through the server: a report's and a heatmap's pass these files so."""

import pytest
from collage_server.app import create_app
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Server
from tests.server.samples import report
from tests.stations import called_files, passes, stations_of
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def traced(settings, clock):
    """A server, and the calls of all threads that it begins."""
    app = create_app(settings, clock=clock)
    with called_files("collage_server") as called, TestClient(app, base_url="http://127.0.0.1") as client:
        yield Server(client, clock, app), called


def test_a_report_passes_its_stations_on_the_way_in(traced):
    server, called = traced
    stations = stations_of("How a report travels")
    inside = stations[stations.index("transport/http.py") + 1 :]
    assert len(inside) == 5
    server.filled()
    assert passes(called, inside[:-1])
    server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"))
    server.app.state.collage.sealer.wake()
    until(lambda: passes(called, inside), "the sealing of the reports")


def test_a_heatmap_passes_its_stations(traced, clock):
    server, called = traced
    server.filled()
    server.seal(journal_full=True)
    server.reports([report(9, step=60)])
    called.clear()
    server.send("GET", "/runs/r1/heatmap?metric=edq_ratio")
    stations = stations_of("How a question is answered: a heatmap")
    assert passes(called, stations)
    assert not passes(called, stations[::-1])
