"""Migrations: from empty to the tables of the code, idempotent, and never backwards."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from collage_server.errors import StoreUnusable
from collage_server.overviews import keep_overview
from collage_server.store import ReportGroup, Selection
from collage_server.store.migrate import head_revision, migrate
from collage_server.store.schema import SERVER_TABLES, metadata
from collage_server.store.sqlite import SqliteStore
from sqlalchemy import UniqueConstraint, text

from tests.server.reads import model_points
from tests.server.samples import report
from tests.server.store.contract import NOW, StoreContract


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


def test_a_store_of_the_first_release_keeps_its_reports(store):
    """Filled by the code of today, then stripped to the first revision's columns: forward again, with the data."""
    StoreContract.fill(store)
    store.journal.append(
        [ReportGroup(store.streams.stream_record("s0"), [report(i, i + 1) for i in range(5)])], NOW
    )
    before = model_points(store, "r1", None, Selection()).totals["lost"].tolist()
    saved = {}
    with store.engine.begin() as connection:
        first = _empty_first_release(store.path.with_name("first.sqlite"))
        with first.engine.begin() as target:
            for name in ("run", "attempt", "stream", "layer", "report", "run_latest"):
                columns = [row[1] for row in target.exec_driver_sql(f"PRAGMA table_info({name})")]
                listed = ", ".join(f'"{column}"' for column in columns)
                rows = connection.exec_driver_sql(f"SELECT {listed} FROM {name}").all()
                marks = ", ".join("?" * len(columns))
                target.exec_driver_sql(f"INSERT INTO {name} ({listed}) VALUES ({marks})", [tuple(r) for r in rows])
                saved[name] = len(rows)
    assert saved["report"] == 5
    first.close()
    first.open()
    try:
        assert model_points(first, "r1", None, Selection()).totals["lost"].tolist() == before
        again = first.journal.append(
            [ReportGroup(first.streams.stream_record("s0"), [report(0, 1), report(5, 6)])], NOW
        )
        assert [(outcome.accepted, outcome.duplicates) for outcome in again] == [(1, 1)]
    finally:
        first.close()


def test_an_evaluation_of_before_is_made_again_and_nobody_has_changed_its_run(tmp_path):
    """Its new columns are empty: what it is grouped by, and tokens/s."""
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store._engine = store._connect()
    with store.writing() as connection:
        migrate(connection, "0012")
        for statement in (
            "INSERT INTO run (run_id, project, name, notes, config, state, created_at, updated_at) "
            "VALUES ('r1', 'p', 'r', '', '{}', 'finished', 5, 7)",
            "INSERT INTO run_overview (run_id, updated_at, reports, overview) VALUES ('r1', 7, 0, '{}')",
        ):
            connection.execute(text(statement))
    store.close()
    store.open()
    try:
        assert (store.runs.get("r1").updated_at, store.runs.get("r1").changed_at) == (7, None)
        assert [due.run_id for due in store.overviews.due(10)] == ["r1"]
        keep_overview(store, store.overviews.due(1)[0])
        assert store.overviews.due(10) == []
    finally:
        store.close()


def test_attempts_of_before_hide_from_their_first_step_on_where_they_measure(tmp_path):
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store._engine = store._connect()
    attempts = (
        "INSERT INTO attempt (run_id, attempt, launch_id, first_step, created_at) VALUES ('r1', {0}, 'l{0}', 5, 0)"
    )
    streams = (
        "INSERT INTO stream (run_id, stream_id, stream, attempt, rank, world_size, process_id, statistics, layers, "
        "elements, replicas, created_at) VALUES ('r1', 's{0}', {0}, {0}, 0, 1, 1, '{1}', '', '', '', 0)"
    )
    with store.writing() as connection:
        migrate(connection, "0015")
        for number, statistics in ((1, '["lost"]'), (2, "[]")):
            connection.execute(text(attempts.format(number)))
            connection.exec_driver_sql(streams.format(number, statistics))
        migrate(connection)
        rows = connection.execute(text("SELECT attempt, measured_from FROM measured_attempt")).all()
    store.close()
    assert [tuple(row) for row in rows] == [(1, 5)]


def _empty_first_release(path):
    """A store whose schema is revision 0001, opened without migrating it further."""
    store = SqliteStore(path, stale_after_seconds=600.0)
    store._engine = store._connect()
    with store.writing() as connection:
        migrate(connection, "0001")
    return store


def test_migrating_twice_changes_nothing(store):
    store.close()
    store.open()
    store.check()


def test_a_newer_schema_is_refused_with_a_sentence(store):
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(StoreUnusable, match="a newer server made it"):
        store.open()


def test_every_unique_key_begins_with_run_id():
    """A distributed PostgreSQL can then shard by it; the server's own small tables stand on every node."""
    for table in set(metadata.tables.values()) - set(SERVER_TABLES):
        keys = [list(table.primary_key.columns)]
        keys += [list(c.columns) for c in table.constraints if isinstance(c, UniqueConstraint)]
        keys += [list(index.columns) for index in table.indexes if index.unique]
        for key in keys:
            assert key[0].name == "run_id", (table.name, [column.name for column in key])
