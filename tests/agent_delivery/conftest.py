"""Fixtures of the delivering side's tests."""

import pytest
from collage_agent.error_guard import raise_in_tests
from collage_agent.session import _SESSION
from collage_agent.transport import MemoryTransport

from tests.agent_delivery.doubles import ServerDouble, make_run


@pytest.fixture(autouse=True)
def no_swallowed_errors(caplog):
    """What the guard or the worker swallows in training fails a test; a test that means it clears the records."""
    raise_in_tests(True)
    yield
    raise_in_tests(False)
    swallowed = [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert swallowed == []


@pytest.fixture(autouse=True)
def ended():
    """A run that a test leaves ends with it."""
    yield
    if _SESSION.run is not None:
        _SESSION.run.finish(seconds=1.0)
    _SESSION.run = None


@pytest.fixture
def server():
    double = ServerDouble()
    yield double
    double.close()


@pytest.fixture
def transport():
    return MemoryTransport()


@pytest.fixture
def run(tmp_path, transport):
    """A run into the transport."""
    return make_run(tmp_path, transport)
