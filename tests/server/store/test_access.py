"""Access on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest
from collage_server.store import PostgresqlStore, SqliteStore

from tests.server.store.access_contract import AccessContract


class TestSqlite(AccessContract):
    @pytest.fixture
    def store(self, tmp_path):
        store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
        store.open()
        yield store
        store.close()


@pytest.mark.slow
class TestPostgresql(AccessContract):
    @pytest.fixture
    def store(self, database):
        store = PostgresqlStore(database, stale_after_seconds=600.0)
        store.open()
        yield store
        store.close()
