"""Migrations: from empty to the tables of the code, idempotent, never backwards, and by command."""

import gzip
import json
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from click.testing import CliRunner
from collage_server.command.migrate import migrate
from collage_server.errors import StoreUnusable
from collage_server.settings import Settings
from collage_server.store import PostgresqlStore
from collage_server.store.migrate import head_revision
from collage_server.store.server_tables import SERVER_TABLES, metadata
from sqlalchemy import UniqueConstraint, text

from tests.server.conftest import Clock, running
from tests.server.samples import report
from tests.server.store.stores import opened

UPGRADES = Path(__file__).with_name("upgrades")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store(request, tmp_path):
    backend = request.param
    database = request.getfixturevalue("database") if backend == "postgresql" else tmp_path / "collage.sqlite"
    with closing(opened(database)) as store:
        yield store


def check_schema(store):
    def ours(_object, name, kind, reflected, _compared):
        """Partitions stand in no code."""
        return not (kind == "table" and reflected and name.rpartition("_")[2].isdigit())

    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "include_object": ours})
        assert context.get_current_revision() == head_revision()
        assert compare_metadata(context, metadata) == []


@pytest.mark.slow
def test_the_migrated_schema_is_that_of_the_code(store):
    check_schema(store)


@pytest.mark.parametrize("revision", ["9999", "r0009", "0015"])
def test_a_schema_of_a_newer_server_or_of_before_the_first_release_is_refused(store, revision):
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    store.close()
    with pytest.raises(StoreUnusable, match=f"'{revision}', which this server does not know: a newer server"):
        store.open()


def test_every_unique_key_begins_with_run_id():
    """A distributed PostgreSQL can then shard by it; the server's own small tables stand on every node."""
    for table in set(metadata.tables.values()) - set(SERVER_TABLES):
        keys = [list(table.primary_key.columns)]
        keys += [list(c.columns) for c in table.constraints if isinstance(c, UniqueConstraint)]
        keys += [list(index.columns) for index in table.indexes if index.unique]
        for key in keys:
            assert key[0].name == "run_id", (table.name, [column.name for column in key])


def held(old, new):
    """What a newer server says holds all that the older one said; fields may have been added."""
    if isinstance(old, dict):
        return all(key in new and held(value, new[key]) for key, value in old.items())
    if isinstance(old, list):
        return len(old) == len(new) and all(map(held, old, new))
    return bool(old == new)


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["r0011", "r0014"])
def test_a_database_of_an_earlier_server_is_taken_over_and_nothing_is_lost(tmp_path, revision):
    """`upgrades/` keeps databases that earlier code made: two ranks and a second launch, in chunks and in reports
    that are not sealed, a note, a token; and what that code's server answered of them."""
    files = {path.suffixes[0]: gzip.decompress(path.read_bytes()) for path in UPGRADES.glob(f"{revision}.*")}
    (tmp_path / "collage.sqlite").write_bytes(files[".sqlite"])
    with running(Settings(folder=tmp_path, no_auth=True), Clock()) as server:
        check_schema(server.app.state.collage.store)
        for _ in range(2):
            for path, text in json.loads(files[".answers"]).items():
                now = server.client.get(f"/api/v1{path}").text
                lines, found = text.splitlines(), now.splitlines()
                assert held([json.loads(line) for line in lines], [json.loads(line) for line in found]), path
            server.seal("old")
        more = [report(i, 280 + i) for i in range(30)]
        told = server.reports(more, "s2")
        assert (told.accepted, told.duplicates) == (10, 20)
        assert server.series("loss", "old", points=10_000).steps == list(range(1, 310))
        assert server.app.state.collage.store.check_database().damaged == ()


def test_the_command_migrates_postgresql_and_says_the_revision(empty_database):
    for _ in range(2):
        result = CliRunner().invoke(migrate, ["--database", empty_database, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output) == {"revision": head_revision()}
    opened(empty_database).close()


def test_sqlite_is_not_its_business(tmp_path):
    result = CliRunner().invoke(migrate, ["--database", f"sqlite:///{tmp_path}/x"])
    assert result.exit_code != 0
    assert "`serve` migrates SQLite" in result.output


def test_a_locked_table_is_given_up_on(empty_database):
    engine = PostgresqlStore(empty_database, stale_after_seconds=600.0, unsafe=True)._connect()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
    with engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
        result = CliRunner().invoke(migrate, ["--database", empty_database, "--lock-timeout", "0.1"])
    engine.dispose()
    assert result.exit_code != 0
    assert "cannot be changed now" in str(result.exception)
