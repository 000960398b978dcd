"""What all loop tests share: errors that the agent would swallow in training are raised."""

from __future__ import annotations

import pytest
import torch
from collage_agent import guard


@pytest.fixture(autouse=True)
def _errors_are_raised():
    guard.raise_in_tests(True)
    yield
    guard.raise_in_tests(False)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
