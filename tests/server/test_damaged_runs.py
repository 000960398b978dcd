"""Runs of which a row is damaged: pages of many runs name them, and answer for all others."""

import logging
import sqlite3
from contextlib import closing
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from collage_dashboard.pages.runs_content import damaged_rows
from collage_server.errors import Damaged
from collage_server.store import RunQuery

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command import show
from collage_monitor.command.mcp import runs
from tests.server.conftest import NOW
from tests.server.samples import report

pytestmark = pytest.mark.slow

DAMAGE = {
    "a number": "UPDATE run SET seed = 4 WHERE run_id = 'r1'",
    "no text any more": "UPDATE run SET notes = CAST(x'80' AS TEXT) WHERE run_id = 'r1'",
    "a tag": "UPDATE run_tag SET position = 7 WHERE run_id = 'r1'",
    "an attempt": "UPDATE attempt SET first_step = 2 WHERE run_id = 'r1'",
    "what was reported last": "UPDATE run_latest SET reports = 6 WHERE run_id = 'r1'",
    "what a stream watches": "UPDATE stream SET watch = '{}' WHERE run_id = 'r1'",
}


def change(server, statement):
    with closing(sqlite3.connect(server.state.store.path)) as connection, connection:
        assert connection.execute(statement).rowcount


@pytest.fixture
def three(server):
    """A server with runs r0, r1 and r2, evaluated; its threads stand still."""
    server.stop_threads()
    for place in range(3):
        server.filled(f"r{place}", stream_id=f"s{place}", name=f"run {place}", tags=["kept"], seed=3)
        server.get(f"/runs/r{place}/overview", wire.Overview)
    return server


@pytest.mark.parametrize("damage", DAMAGE)
def test_lists_name_a_damaged_run_and_answer_for_the_others(three, damage):
    change(three, DAMAGE[damage])
    [group] = three.get("/run-groups?by=strategy&open=", wire.RunGroups).rows
    grouped = three.get(f"/run-groups?by=strategy&open={quote(group.group.key)}", wire.RunGroups)
    page, table = three.get("/runs", wire.RunPage), three.get("/run-table?sort=created_at", wire.RunTable)
    opened = [row.run for row in grouped.rows if row.run]
    for listed, beside in ((page.runs, page), (table.rows, table), (opened, grouped)):
        assert [run.run_id for run in listed] == ["r2", "r0"], type(beside)
        [damaged] = beside.damaged
        assert damaged.run_id == "r1"
        assert damaged.message.startswith("run r1: ")
        assert damaged.message.endswith("restore a back-up")
    assert three.get("/runs/r1", status=503).code == "damaged"
    assert three.get("/runs/r0", wire.Run).name == "run 0"


def test_metrics_go_on_without_a_damaged_run(three):
    assert 'run_id="r1"' in three.get("/metrics")
    change(three, DAMAGE["what was reported last"])
    text = three.get("/metrics")
    assert [f'run_id="r{place}"' in text for place in range(3)] == [True, False, True]


def test_newest_steps_are_kept_of_the_others(three, caplog):
    """A round of the summariser ended at the first damaged run."""
    for place in range(3):
        three.reports([report(9, 90)], f"s{place}")
    change(three, "UPDATE report SET model = zeroblob(length(model)) WHERE run_id = 'r1'")
    with caplog.at_level(logging.WARNING):
        three.state.summariser.keep_points()
    assert list(three.store.summaries.due_points(10)) == ["r1"]
    [told] = [record for record in caplog.records if record.name == "collage_server.summariser"]
    assert told.exc_info is None
    assert "run r1 cannot be read" in told.getMessage()
    assert "report 9 of stream s1, step 90, is damaged" in told.getMessage()
    page = three.get("/runs", wire.RunPage)
    assert ([run.run_id for run in page.runs], [run.run_id for run in page.damaged]) == (["r2", "r0"], ["r1"])


def test_no_text_is_refused_for_one_that_is_damaged(three):
    """All of the pages and filters were: SQLite's driver refuses the rows of a question at the first such text."""
    for table, column in (("run", "name"), ("run", "strategy"), ("run_tag", "tag"), ("run_latest", "scalars")):
        change(three, f"UPDATE {table} SET {column} = CAST(x'8061' AS TEXT) WHERE run_id = 'r1'")
        for path in ("/runs", "/run-table", "/run-groups?by=strategy", "/run-groups?by=group", "/run-filters"):
            three.get(path)
        assert three.get("/run-table", wire.RunTable).damaged
        assert 'run_id="r0"' in three.get("/metrics")


def test_a_database_that_holds_no_text_any_more_is_not_away(three):
    change(three, DAMAGE["no text any more"])
    store = three.state.store
    with pytest.raises(Damaged, match="restore a back-up"):
        store.runs.get("r1")
    assert store.dependency.away_since is None
    assert three.get("/readyz", wire.Health).away == []
    assert len(store.runs.page(RunQuery(), NOW, 600.0).runs) == 2


def test_pages_go_on_after_a_damaged_run_and_clients_count_and_say_it(three, monkeypatch):
    change(three, DAMAGE["a number"])
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = three.get(f"/runs?limit=1{cursor and '&cursor='}{cursor}", wire.RunPage)
        found += [*(run.run_id for run in page.runs), *(run.run_id for run in page.damaged)]
        cursor = page.cursor
    assert found == ["r2", "r1", "r0"]
    with Client("http://127.0.0.1", transport=three.transport()) as client:
        with pytest.warns(UserWarning, match="left out: run r1: the row of `run`"):
            assert client.runs_frame()["run_id"].to_pylist() == ["r2", "r0"]
        with pytest.warns(UserWarning, match="left out: run r1: the row of `run`"):
            assert [run.run_id for run in client.all_runs()] == ["r2", "r0"]
        [told] = [line for line in runs(client) if "left out" in line]
        assert "the row of `run`" in told
        table = client.run_table()
    [row] = damaged_rows(table.damaged)
    assert (row["name"], row["brief"]) == ("r1", "Damaged")
    assert "restore a back-up" in row["headline"]
    opened = Client("http://127.0.0.1", transport=three.transport())
    monkeypatch.setattr(show, "open_client", lambda *_: opened)
    said = CliRunner().invoke(show.list_runs, [], catch_exceptions=False)
    assert said.stderr.startswith("left out: run r1: the row of `run` with run_id 'r1' is damaged")
    assert [name in said.stdout for name in ("run 0", "run 1", "run 2")] == [True, False, True]
    assert "more;" not in said.stdout
