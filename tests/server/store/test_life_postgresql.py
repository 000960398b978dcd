"""Retention and deletion on PostgreSQL; autovacuum gives the space back."""

from __future__ import annotations

import pytest

from tests.server.store.life import LifeContract
from tests.server.store.second_writers import SecondWritersContract
from tests.server.store.test_postgresql import reopen, store

pytestmark = pytest.mark.slow

__all__ = ["reopen", "store"]


class TestPostgresqlLife(LifeContract):
    """The contract on PostgreSQL."""


class TestPostgresqlSecondWriters(SecondWritersContract):
    """Who logs beside the training, on PostgreSQL."""
