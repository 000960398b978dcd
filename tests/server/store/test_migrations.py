"""Migrations: from empty to the tables of the code, idempotent, and never backwards."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from collage_server.errors import StoreUnusable
from collage_server.store.migrate import head_revision
from collage_server.store.server_tables import SERVER_TABLES, metadata
from collage_server.store.sqlite import SqliteStore
from sqlalchemy import UniqueConstraint, text


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    yield store
    store.close()


def test_the_migrated_schema_is_that_of_the_code(store):
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == head_revision()
        assert compare_metadata(context, metadata) == []


@pytest.mark.parametrize("revision", ["9999", "r0009", "0015"])
def test_a_schema_of_a_newer_server_or_of_before_the_first_release_is_refused(store, revision):
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    store.close()
    with pytest.raises(
        StoreUnusable, match=f"'{revision}', which this server does not know: a newer server made it"
    ):
        store.open()


def test_every_unique_key_begins_with_run_id():
    """A distributed PostgreSQL can then shard by it; the server's own small tables stand on every node."""
    for table in set(metadata.tables.values()) - set(SERVER_TABLES):
        keys = [list(table.primary_key.columns)]
        keys += [list(c.columns) for c in table.constraints if isinstance(c, UniqueConstraint)]
        keys += [list(index.columns) for index in table.indexes if index.unique]
        for key in keys:
            assert key[0].name == "run_id", (table.name, [column.name for column in key])
