"""A drill finds a copy that answers otherwise, and counts what a loss would cost."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest
from click.testing import CliRunner
from collage_server.command.backup import backup as backup_verb
from collage_server.export.drill import drill
from collage_server.store import SqliteStore
from collage_server.store.backup import back_up, restore

from collage_monitor import wire
from tests.server.samples import report


def told(folder, *arguments):
    result = CliRunner().invoke(backup_verb, ["make", *map(str, arguments), "--dir", str(folder)])
    return result.exit_code, result.stdout


@pytest.mark.slow
def test_a_drill_restores_aside_compares_and_leaves_nothing(server, settings, tmp_path):
    server.filled(steps=range(1, 21))
    server.app.state.collage.store.sealing.seal("r1", server.clock() + 1000.0)
    copies = tmp_path / "copies"
    copies.mkdir()
    status, text = told(settings.folder, copies / "one", "--drill")
    assert status == 0, text
    assert "restored aside: 1 runs compared by digest, 0 of them differ" in text
    assert "a loss now would cost 0 reports of 0 runs and of 0 whole runs" in text
    status, text = told(settings.folder, copies / "two", "--drill", "--json")
    assert (status, json.loads(text)["drill"]["compared"]) == (0, 1)
    assert not list(copies.glob("drill-*"))


@pytest.fixture
def pair(server, settings, tmp_path):
    """The server's own store, and one on a restored copy."""
    server.filled(steps=range(1, 21))
    back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "aside" / "collage.sqlite")
    copy = SqliteStore(tmp_path / "aside" / "collage.sqlite", stale_after_seconds=600.0)
    copy.open()
    yield server.app.state.collage.store, copy
    copy.close()


def test_a_copy_that_differs_or_cannot_be_read_is_named(pair):
    own, copy = pair
    assert drill(own, copy, 10).problems == ()
    for change, problem in (
        ("UPDATE report SET time = time + 1, checks = NULL", "run r1 differs"),
        ("UPDATE report SET time = time + 1, checks = x'0000'", "the copy cannot read run r1: run r1: report"),
    ):
        with closing(sqlite3.connect(copy.path)) as connection, connection:
            connection.execute(change)
        [found] = drill(own, copy, 10).problems
        assert found.startswith(problem)


def test_what_came_since_is_counted(server, pair):
    own, copy = pair
    server.reports([report(100, 21), report(101, 22)])
    server.post("/projects/p/runs", wire.RunCreate(run_id="r2"), wire.Run, 201)
    found = drill(own, copy, 10)
    assert (found.lost_reports, found.lost_in_runs, found.lost_runs, found.compared) == (2, 1, 1, 0)
