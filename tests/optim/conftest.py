"""Fixtures of the optimizers' tests."""

import pytest

from tests.reference.step_totals import taken_down


@pytest.fixture
def intentions(monkeypatch):
    """The step's own u, tensor by tensor, taken down beside the totals."""
    return taken_down(monkeypatch)
