"""Fixtures of the delivering side's tests."""

import pytest
from collage_agent.guard import raise_in_tests

from tests.agent_delivery.doubles import ServerDouble


@pytest.fixture(autouse=True)
def no_swallowed_errors():
    raise_in_tests(True)
    yield
    raise_in_tests(False)


@pytest.fixture
def server():
    double = ServerDouble()
    yield double
    double.close()
