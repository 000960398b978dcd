"""What all agent tests share: errors that the agent would swallow in training are raised."""

import pytest
import torch
from collage_agent import error_guard


@pytest.fixture(autouse=True)
def _errors_are_raised():
    error_guard.raise_in_tests(True)
    yield
    error_guard.raise_in_tests(False)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
