"""Fixtures of the end-to-end tests."""

import pytest

from collage_monitor.client import Client
from collage_monitor.local import read_token
from tests.end_to_end.servers import killable_server


@pytest.fixture
def server(tmp_path):
    """A real server in a process of its own, that can be killed and started again on the same port and folder."""
    with killable_server(tmp_path) as started:
        yield started


@pytest.fixture
def client(server):
    """Asks that server, with its own token."""
    with Client(server.url, read_token(server.folder)) as reader:
        yield reader
