"""Back-up while serving, restore elsewhere: what is in it, what is not, and what happens to reports in between."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing

import pytest
from click.testing import CliRunner
from collage_server.app import create_app
from collage_server.command.backup import backup as backup_verb
from collage_server.errors import StoreUnusable
from collage_server.settings import Settings
from collage_server.store.backup import back_up, restore
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.samples import report


@pytest.fixture
def restored(tmp_path):
    """Serves a back-up that was restored into a folder of its own."""
    opened = []

    def serve(file):
        restore(file, tmp_path / "other" / "collage.sqlite")
        app = create_app(Settings(folder=tmp_path / "other", no_auth=True), clock=Clock())
        client = TestClient(app, base_url="http://127.0.0.1")
        opened.append(client)
        return Server(client.__enter__(), None, app)

    yield serve
    for client in opened:
        client.__exit__(None, None, None)


def seqs(server, stream_id="s0"):
    """How many reports a stream holds."""
    streams = server.get("/runs/r1/streams", wire.StreamList).streams
    return next(stream.reports for stream in streams if stream.stream_id == stream_id)


@pytest.mark.slow
def test_a_restored_server_answers_what_the_old_one_did(server, settings, tmp_path, restored):
    server.filled(steps=range(1, 301))
    store = server.app.state.collage.store
    while store.sealing.seal("r1", server.clock() + 1000.0):
        pass
    server.reports([report(1000, 301)])
    made = back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
    assert made.runs == 1
    again = restored(tmp_path / "copy")
    for question in ("series?metric=edq_ratio", "series?metric=loss", "heatmap?metric=edq_ratio", "export", ""):
        path = f"/api/v1/runs/r1/{question}".rstrip("/")
        answers = [one.client.get(path).text.splitlines() for one in (again, server)]
        # What an export has more is the event that tells of the restore.
        answers[0] = [line for line in answers[0] if '"restored"' not in line]
        assert answers[0] == answers[1], question


@pytest.mark.slow
def test_the_loss_window_is_what_came_after(server, settings, tmp_path, restored):
    server.filled(steps=range(10, 60, 10))
    back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
    server.reports([report(5, 60)])
    server.run("later")
    again = restored(tmp_path / "copy")
    assert again.series("loss").steps == [10, 20, 30, 40, 50]
    again.get("/runs/later", status=404)
    told = again.get("/runs/r1/events", wire.EventPage).events[-1]
    assert told.kind == "restored"
    assert told.text.startswith("the server's data were restored from a back-up made 20")
    # A sender that repeats what it still has is stored exactly once, before and after the back-up.
    answer = again.reports([report(4, 50), report(5, 60)])
    assert (answer.accepted, answer.duplicates) == (1, 1)


@pytest.mark.slow
def test_all_acknowledged_before_is_in_it_and_nothing_in_half(server, settings, tmp_path, restored):
    server.filled(steps=range(1, 3))
    sent, stop = [2], threading.Event()

    def send():
        while not stop.is_set() and sent[0] < 400:
            first = sent[0]
            server.reports([report(first + i, first + i + 1) for i in range(3)])
            sent[0] = first + 3

    thread = threading.Thread(target=send)
    thread.start()
    try:
        before = sent[0]
        back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
        after = sent[0] + 3
    finally:
        stop.set()
        thread.join()
    again = restored(tmp_path / "copy")
    count = seqs(again)
    assert before <= count <= after
    assert (count - 2) % 3 == 0
    assert again.series("loss", points=1000).steps == list(range(1, count + 1))


def test_a_back_up_keeps_what_is_set_before_the_first_table(server, settings, tmp_path):
    server.filled()
    back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
    with closing(sqlite3.connect(tmp_path / "copy")) as connection:
        assert connection.execute("PRAGMA page_size").fetchone() == (16384,)
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def test_nothing_is_ever_overwritten(server, settings, tmp_path):
    server.filled()
    (tmp_path / "copy").write_text("precious")
    with pytest.raises(StoreUnusable, match="exists"):
        back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
    back_up(settings.folder / "collage.sqlite", tmp_path / "copy2")
    with pytest.raises(StoreUnusable, match="exists"):
        restore(tmp_path / "copy2", settings.folder / "collage.sqlite")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "collage.sqlite-wal").write_text("of another database")
    with pytest.raises(StoreUnusable, match="-wal exists"):
        restore(tmp_path / "copy2", tmp_path / "new" / "collage.sqlite")
    assert (tmp_path / "copy").read_text() == "precious"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_damage_is_seen_before_anything_is_put_in_place(server, settings, tmp_path):
    server.filled(steps=range(1, 200))
    back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
    data = bytearray((tmp_path / "copy").read_bytes())
    data[16384 * 3 : 16384 * 3 + 64] = bytes(64)
    (tmp_path / "copy").write_bytes(data)
    with pytest.raises(StoreUnusable, match=r"damaged|no back-up"):
        restore(tmp_path / "copy", tmp_path / "new" / "collage.sqlite")
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StoreUnusable, match="no back-up"):
        restore(tmp_path / "text", tmp_path / "new" / "collage.sqlite")


def test_a_back_up_of_a_newer_server_is_refused(server, settings, tmp_path):
    server.filled()
    back_up(settings.folder / "collage.sqlite", tmp_path / "copy")
    with closing(sqlite3.connect(tmp_path / "copy")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreUnusable, match="newer server"):
        restore(tmp_path / "copy", tmp_path / "new" / "collage.sqlite")


def test_the_verbs(server, settings, tmp_path, monkeypatch):
    server.filled()
    folder = str(settings.folder)
    done = CliRunner().invoke(backup_verb, ["make", str(tmp_path / "copy"), "--dir", folder, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["runs"] == 1
    done = CliRunner().invoke(backup_verb, ["restore", str(tmp_path / "copy"), "--dir", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert "1 runs" in done.output
    assert (tmp_path / "new" / "collage.sqlite").exists()
    nowhere = CliRunner().invoke(backup_verb, ["make", str(tmp_path / "c2"), "--dir", str(tmp_path / "none")])
    assert isinstance(nowhere.exception, StoreUnusable)
    monkeypatch.setenv("COLLAGE_SERVER_DATABASE", "postgresql://localhost/collage")
    dump = CliRunner().invoke(backup_verb, ["make", str(tmp_path / "c3"), "--dir", folder])
    assert dump.exit_code == 1
    assert "pg_dump" in dump.output
