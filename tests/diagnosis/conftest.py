"""A server of this process that runs are reported to and read from."""

import pytest
from collage_agent.session import _SESSION
from collage_server.app import create_app
from collage_server.settings import Settings
from starlette.testclient import TestClient

from collage_monitor.client import Client
from tests.server.conftest import Clock, Server
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def served(tmp_path):
    """A server of this process with its helper, and a client that reads from it."""
    clock = Clock()
    # Its own evaluator would take the lease from a test's, once a test takes longer than a round of real time.
    app = create_app(Settings(folder=tmp_path, no_auth=True, alerts="off"), clock=clock)
    with TestClient(app, base_url="http://127.0.0.1") as inside:
        app.state.collage.summariser.stop(PATIENCE_SECONDS)
        server = Server(inside, clock, app)
        yield server, Client("http://127.0.0.1", transport=server.transport())
    if _SESSION.run is not None:
        _SESSION.run.finish(seconds=1.0)
    _SESSION.run = None
    _SESSION.waiting.clear()
    _SESSION.averages.unwrap()
