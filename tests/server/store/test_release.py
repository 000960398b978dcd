"""A database of the last revision before the baseline is taken over with its data, on both databases."""

from __future__ import annotations

import json

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from collage_server.app import create_app
from collage_server.errors import StoreUnusable
from collage_server.settings import Settings
from collage_server.store import PostgresqlStore, SqliteStore, schema
from collage_server.store.migrate import current_revision, head_revision, migrate
from collage_server.store.server_tables import saved_view
from sqlalchemy import func, select, text, update
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.samples import report
from tests.server.store.contract import LIMITS
from tests.server.store.release import as_released, holds, read_release

pytestmark = pytest.mark.slow
GONE = ("measured_point", "layer_point", "run_change")


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path):
    if request.param == "sqlite":
        made: SqliteStore | PostgresqlStore = SqliteStore(
            tmp_path / "collage.sqlite", stale_after_seconds=600.0, limits=LIMITS
        )
    else:
        url = request.getfixturevalue("empty_database")
        made = PostgresqlStore(url, stale_after_seconds=600.0, limits=LIMITS)
    as_released(made)
    return made


def forward(store):
    """What an operator does: `migrate` for PostgreSQL; SQLite is migrated when it is opened."""
    if isinstance(store, PostgresqlStore):
        store.migrate()


def serving(store, tmp_path):
    clock = Clock()
    app = create_app(Settings(folder=tmp_path, no_auth=True), store=store, clock=clock)
    return TestClient(app, base_url="http://127.0.0.1"), clock, app


def test_every_answer_of_before_is_this_server_s_too(store, tmp_path):
    forward(store)
    client, clock, app = serving(store, tmp_path)
    with client:
        server = Server(client, clock, app)
        for path, known in read_release()["answers"].items():
            answer = json.loads(server.get(path))
            assert holds(answer, known), (path, known, answer)
        assert server.get("/runs/r3", status=410).code == "gone"


def test_its_schema_is_that_of_the_code_and_no_row_is_lost(store):
    """But for tables that nobody reads any more; when a run was changed stands in its own row."""
    engine = store._connect()
    with engine.begin() as connection:
        migrate(connection)
    with engine.connect() as connection:
        assert current_revision(connection) == head_revision()
        options = {"compare_type": True, "include_object": lambda _, name, *__: not name[-1].isdigit()}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata) == []
        for name, rows in read_release()["tables"].items():
            if name not in GONE:
                table = schema.metadata.tables[name]
                assert connection.execute(select(func.count()).select_from(table)).scalar() == len(rows), name
        changed = dict(connection.execute(select(schema.run.c.run_id, schema.run.c.changed_at)).all())
        (known,) = read_release()["tables"]["run_change"]
        assert changed == {"r1": None, "r2": None} | {known["run_id"]: known["changed_at"]}
    engine.dispose()


def test_chunks_that_tell_ranks_alone_get_the_streams_of_these(store):
    """So that a late report still counts once. Early servers stored no streams."""
    engine = store._connect()
    chunk = schema.point_chunk
    fine = select(chunk.c.run_id, chunk.c.attempt, chunk.c.chunk, chunk.c.part, chunk.c.contributor_streams)
    fine = fine.where(chunk.c.level == 1).order_by(*fine.selected_columns[:4])
    with engine.begin() as connection:
        known = connection.execute(fine).all()
        connection.execute(update(chunk).values(contributor_streams=None, unfinished=None))
    with engine.begin() as connection:
        migrate(connection)
        assert connection.execute(fine).all() == known
    assert known
    engine.dispose()


def test_newest_steps_that_were_kept_without_their_time_are_written_anew(store, tmp_path):
    """As r0002 made their table at first."""
    engine = store._connect()
    with engine.begin() as connection:
        migrate(connection)
        connection.execute(text("ALTER TABLE run_newest DROP COLUMN made_at"))
        row = {"run_id": "r1", "updated_at": 1.0, "reports": 1, "made_by": "older", "point": None}
        connection.execute(text(f"INSERT INTO run_newest ({', '.join(row)}) VALUES (:{', :'.join(row)})"), row)
        for table in (schema.segment, schema.segment_gone, saved_view):
            table.drop(connection)
        for of, column in (("run", "configuration"), ("run", "treated_as"), ("run_overview", "intended_share")):
            connection.execute(text(f"ALTER TABLE {of} DROP COLUMN {column}"))
        connection.execute(text("UPDATE alembic_version SET version_num = 'r0003'"))
    engine.dispose()
    forward(store)
    client, clock, app = serving(store, tmp_path)
    with client:
        assert "r1" in app.state.collage.store.newest.due(10, "newer")
        assert Server(client, clock, app).get("/runs/r1/latest", wire.Latest).step is not None


@pytest.mark.parametrize("revision", ["0001", "0014"])
def test_what_is_older_is_refused_and_told_the_way(store, revision):
    engine = store._connect()
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    with engine.begin() as connection, pytest.raises(StoreUnusable, match="bring it to revision 0015"):
        migrate(connection)
    with pytest.raises(StoreUnusable, match="bring it to revision 0015"):
        store.open()
    engine.dispose()


def test_its_runs_go_on(store, tmp_path):
    """Duplicates are known, its frozen steps take no totals, new reports are sealed beside its chunks."""
    forward(store)
    client, clock, app = serving(store, tmp_path)
    with client:
        server = Server(client, clock, app)
        again = server.reports([report(i, i + 1) for i in range(80)])
        assert (again.accepted, again.duplicates) == (0, 80)
        late = server.reports([report(200, 3), report(201, 60)])
        assert [(entry.seq, entry.code) for entry in late.rejected] == [(200, "past_horizon")]
        server.reports([report(i, 75 + i) for i in range(4, 40)], "s2")
        server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
        while store.sealing.seal("r1", clock.now):
            pass
        series = server.series("lost_update_ratio", points=10_000)
        assert series.steps == [16, 32, *range(33, 115)]
        assert not store.journal.runs() or store.journal.runs() == ["r2"]
