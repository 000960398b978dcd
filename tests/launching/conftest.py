"""Shared by the tests of launching and integrations: errors that the agent would swallow in training are raised."""

import collage_agent as collage
import pytest
import torch
from collage_agent.error_guard import raise_in_tests


@pytest.fixture(autouse=True)
def _errors_are_raised(monkeypatch, tmp_path):
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path / "data"))
    torch.set_num_threads(1)
    raise_in_tests(True)
    yield
    collage.finish()
    raise_in_tests(False)
