"""A dashboard on a server in memory, and small answers to draw."""

import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.app import render
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import read_address

from tests.dashboard.fake_server import FakeServer
from tests.dashboard.generated import GeneratedRun, demo_runs

RUNS = [*demo_runs(), GeneratedRun("live", "stochastic", state="running")]
"""They keep what was computed of them from test to test."""


@pytest.fixture
def server():
    """The demo's five runs and a live one with stochastic rounding."""
    return FakeServer(RUNS)


@pytest.fixture
def reader(server):
    """The dashboard's way to that server."""
    return Reader(server.client)


@pytest.fixture
def app(server):
    """A dashboard that reads from it."""
    return create_dashboard(server.client)


@pytest.fixture
def http(app):
    """A test client of that dashboard, as a browser is."""
    return app.server.test_client()


@pytest.fixture
def shown(reader):
    """Lays out the page of an address."""

    def page(address):
        pathname, _, search = address.partition("?")
        return render(read_address(pathname, search), reader)

    return page
