"""`collage-monitor setup database`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from collage_server.command.migrate import migrate
from collage_server.store import PostgresqlStore
from collage_server.store.migrate import head_revision

pytestmark = pytest.mark.slow


def test_it_migrates_and_says_the_revision(empty_database):
    for _ in range(2):
        result = CliRunner().invoke(migrate, ["--database", empty_database, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output) == {"revision": head_revision()}
    store = PostgresqlStore(empty_database, stale_after_seconds=600.0)
    store.open()
    store.close()


def test_sqlite_is_not_its_business(tmp_path):
    result = CliRunner().invoke(migrate, ["--database", f"sqlite:///{tmp_path}/x"])
    assert result.exit_code != 0
    assert "`serve` migrates SQLite" in result.output


def test_a_locked_table_is_given_up_on(empty_database):
    store = PostgresqlStore(empty_database, stale_after_seconds=600.0, unsafe=True)
    engine = store._connect()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
    with engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
        result = CliRunner().invoke(migrate, ["--database", empty_database, "--lock-timeout", "0.1"])
    engine.dispose()
    assert result.exit_code != 0
    assert "cannot be changed now" in str(result.exception)
