"""From the previous release, with its data: read by this one, written to by both while a cluster is migrated."""

from __future__ import annotations

import json
import threading

import pytest
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from collage_server.app import create_app
from collage_server.settings import Settings
from collage_server.store import PostgresqlStore, SqliteStore
from collage_server.store.migrate import _SCRIPTS, migrate
from sqlalchemy import create_engine, inspect, text
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.samples import report
from tests.server.store.contract import LIMITS
from tests.server.store.release import CHANGED_SINCE, OLDEST, PREVIOUS, holds, insert_rows, read_release
from tests.waiting import until

pytestmark = pytest.mark.slow

REVISION, _, _ = read_release(PREVIOUS)


def as_released(store, release=PREVIOUS):
    """The store's database as a release left it; the store stays closed."""
    revision, tables, _ = read_release(release)
    engine = store._connect()
    with engine.begin() as connection:
        migrate(connection, revision)
        insert_rows(connection, tables)
    engine.dispose()


@pytest.fixture(params=[OLDEST, PREVIOUS], ids=lambda path: path.name.partition(".")[0])
def release(request):
    return request.param


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, release, tmp_path):
    if request.param == "sqlite":
        made: SqliteStore | PostgresqlStore = SqliteStore(
            tmp_path / "collage.sqlite", stale_after_seconds=600.0, limits=LIMITS
        )
    else:
        url = request.getfixturevalue("empty_database")
        made = PostgresqlStore(url, stale_after_seconds=600.0, limits=LIMITS)
    as_released(made, release)
    return made


def forward(store):
    """What an operator does: `migrate` for PostgreSQL; SQLite is migrated when it is opened."""
    if isinstance(store, PostgresqlStore):
        store.migrate()


def serving(store, tmp_path):
    clock = Clock()
    app = create_app(Settings(folder=tmp_path, no_auth=True), store=store, clock=clock)
    return TestClient(app, base_url="http://127.0.0.1"), clock, app


def test_every_answer_of_an_earlier_release_is_this_one_s_too(store, release, tmp_path):
    forward(store)
    _, _, answers = read_release(release)
    client, clock, app = serving(store, tmp_path)
    with client:
        server = Server(client, clock, app)
        for path, known in answers.items():
            answer = json.loads(server.get(path))
            assert holds(answer, known, CHANGED_SINCE[release]), (path, known, answer)
        assert server.get("/runs/r3", status=410).code == "gone"


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


def old_run(connection, number):
    """The previous release's own statements, as it sends them while it still serves."""
    run_id = f"old{number}"
    for statement in (
        'INSERT INTO run (run_id, project, name, "group", notes, seed, config, state, created_at, updated_at) '
        "VALUES (:run, 'p', :run, NULL, '', NULL, '{}', 'running', 1.7e9, 1.7e9)",
        "INSERT INTO attempt (run_id, attempt, launch_id, first_step, created_at) VALUES (:run, 1, 'l', 1, 1.7e9)",
        "INSERT INTO stream (run_id, stream_id, stream, attempt, rank, world_size, process_id, statistics, layers, "
        "elements, replicas, created_at) VALUES (:run, :run, 1, 1, 0, 1, 7, '[\"lost\"]', '', '', '', 1.7e9)",
        "INSERT INTO run_latest (run_id, stream_id, attempt, rank, reports, scalars) "
        "VALUES (:run, :run, 1, 0, 0, '{}')",
        "SELECT reports, scalars, sealed FROM run_latest WHERE run_id = :run AND stream_id = :run FOR UPDATE",
        "INSERT INTO report (run_id, stream_id, seq, step, time, scalars, statistic_count, layer_count, model, "
        "statistics) VALUES (:run, :run, 0, 1, 1.7e9, '{\"loss\": 2.0}', 0, 0, NULL, NULL) ON CONFLICT DO NOTHING",
        "UPDATE run_latest SET reports = 1, last_seq = 0, first_step = 1, last_step = 1, first_time = 1.7e9, "
        "last_report_at = 1.7e9, scalars = '{\"loss\": [1, 2.0]}', clock_skew_seconds = 0.0 "
        "WHERE run_id = :run AND stream_id = :run",
    ):
        connection.execute(text(statement), {"run": run_id})


def test_the_previous_release_serves_while_its_database_is_migrated(empty_database):
    store = PostgresqlStore(empty_database, stale_after_seconds=600.0, limits=LIMITS)
    as_released(store)
    engine = create_engine(empty_database.replace("postgresql://", "postgresql+psycopg://"))
    done, errors = threading.Event(), []
    written: list[int] = []

    def serve():
        try:
            while not done.is_set():
                with engine.begin() as connection:
                    old_run(connection, len(written))
                written.append(len(written))
        except Exception as error:
            errors.append(error)

    server = threading.Thread(target=serve)
    server.start()
    try:
        until(lambda: errors or len(written) >= 5, "five runs written before the migration")
        store.migrate()
        after = len(written)
        until(lambda: errors or len(written) >= after + 5, "five more written after it")
    finally:
        done.set()
        server.join()
        engine.dispose()
    assert errors == []
    store.open()
    try:
        for number in range(len(written)):
            assert store.runs.get(f"old{number}").scalars["loss"].value == 2.0
            assert store.streams.of_run(f"old{number}")[0].reports == 1
    finally:
        store.close()


_GONE = ("measured_point", "layer_point")
"""Tables that a later revision takes away: only sealing wrote them."""


def columns(connection):
    found = inspect(connection)
    return {
        (table, column["name"]): (str(column["type"]), column["nullable"] or column["default"] is not None)
        for table in found.get_table_names()
        for column in found.get_columns(table)
    }


def test_every_migration_since_only_expands(tmp_path):
    """So that the previous release goes on: nothing is taken away or changed, what is new may be left out."""
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    as_released(store)
    engine = store._connect()
    script = ScriptDirectory(str(_SCRIPTS))
    with engine.connect() as connection:
        before = columns(connection)
    later = [entry.revision for entry in script.walk_revisions() if entry.revision > REVISION]
    for revision in reversed(later):
        with engine.begin() as connection:
            migrate(connection, revision)
        with engine.connect() as connection:
            after = columns(connection)
        kept = {key: kind for key, kind in before.items() if key[0] not in _GONE}
        assert {key: after.get(key) for key in kept} == kept, revision
        old_tables = {table for table, _ in before}
        for (table, column), (_, optional) in after.items():
            assert (table, column) in before or table not in old_tables or optional, (revision, table, column)
        before = after
    with engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == script.get_current_head()
    engine.dispose()
