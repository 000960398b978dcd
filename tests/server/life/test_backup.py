"""Back-up while serving, restore elsewhere, drills: what is in it, and what becomes of reports in between."""

import json
import sqlite3
from contextlib import ExitStack, closing
from itertools import count

import pytest
from click.testing import CliRunner
from collage_server.command.backup import backup as backup_verb
from collage_server.errors import StoreUnusable
from collage_server.export.drill import drill
from collage_server.settings import Settings
from collage_server.store.backup import back_up, restore
from collage_server.store.sealing import archive_plan

from collage_monitor import wire
from tests.server.conftest import Clock, running
from tests.server.samples import report
from tests.server.store.stores import LIMITS, archive_all, finish, opened, paths, seal_all
from tests.waiting import beside, until

CURVE, MAP = "/series?metric=edq_ratio&points=1000", "/heatmap?metric=edq_ratio"
OTHERS = ("", "/streams", "/layers", "/latest", "/series?metric=loss", "/worst?metric=edq_ratio&k=2")
QUESTIONS = (*OTHERS, CURVE, f"{CURVE}&layer=blocks.0.weight", MAP, f"{MAP}&from=50&to=70")


@pytest.fixture
def restored(tmp_path):
    """Serves a back-up that was restored into a folder of its own."""
    with ExitStack() as stack:

        def serve(file):
            restore(file, tmp_path / "other" / "collage.sqlite", archive=tmp_path / "other" / "archive")
            return stack.enter_context(running(Settings(folder=tmp_path / "other", no_auth=True), Clock()))

        yield serve


@pytest.fixture
def copy(server, settings, tmp_path):
    """Makes a back-up of the server's data; its file."""

    def make(name="copy"):
        assert back_up(settings.folder / "collage.sqlite", tmp_path / name).runs == 1
        return tmp_path / name

    return make


def seqs(server, stream_id="s0"):
    """How many reports a stream holds."""
    streams = server.get("/runs/r1/streams", wire.StreamList).streams
    return next(stream.reports for stream in streams if stream.stream_id == stream_id)


@pytest.mark.slow
def test_a_restored_server_answers_what_the_old_one_did(server, copy, restored):
    server.filled(steps=range(1, 301))
    seal_all(server.app.state.collage.store, now=server.clock() + 1000.0)
    server.reports([report(1000, 301)])
    again = restored(copy())
    for question in (*QUESTIONS, "/export"):
        answers = [one.client.get(f"/api/v1/runs/r1{question}").text.splitlines() for one in (again, server)]
        # What an export has more is the event that tells of the restore.
        answers[0] = [line for line in answers[0] if '"restored"' not in line]
        assert answers[0] == answers[1], question


@pytest.mark.slow
def test_what_is_archived_meanwhile_is_backed_up_whole_once_and_answers_elsewhere(
    server, settings, tmp_path, restored, monkeypatch
):
    monkeypatch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
    store, copies, numbers = server.app.state.collage.store, tmp_path / "copies", count(0, 32)
    store.sealing.limits = LIMITS
    copies.mkdir()
    server.filled(steps=range(1, 201))
    finish(store)
    archive_all(store)
    server.filled("r2", "s2", steps=[])

    def report_on():
        first = next(numbers)
        server.reports([report(first + i, first + i + 1) for i in range(32)], "s2")
        seal_all(store, "r2")
        archive_all(store, "r2")

    def back_up_to(name):
        return back_up(settings.folder / "collage.sqlite", copies / name, archive=settings.folder / "archive")

    with beside(report_on):
        first = back_up_to("one")
        until(lambda: len(paths(store)) > first.archived_files, "more files")
        second = back_up_to("two")
    assert first.copied_files == first.archived_files > 0
    assert second.copied_files == second.archived_files - first.archived_files > 0
    again = restored(copies / "two")
    for question in QUESTIONS:
        answers = [one.client.get(f"/api/v1/runs/r1{question}").text for one in (again, server)]
        assert answers[0] == answers[1], question


@pytest.mark.slow
def test_the_loss_window_is_what_came_after(server, copy, restored):
    server.filled(steps=range(10, 60, 10))
    made = copy()
    server.reports([report(5, 60)])
    server.run("later")
    again = restored(made)
    assert again.series("loss").steps == [10, 20, 30, 40, 50]
    again.get("/runs/later", status=404)
    told = again.get("/runs/r1/events", wire.EventPage).events[-1]
    assert told.kind == "restored"
    assert told.text.startswith("the server's data were restored from a back-up made 20")
    # A sender that repeats what it still has is stored exactly once, before and after the back-up.
    answer = again.reports([report(4, 50), report(5, 60)])
    assert (answer.accepted, answer.duplicates) == (1, 1)


@pytest.mark.slow
def test_all_acknowledged_before_is_in_it_and_nothing_in_half(server, copy, restored):
    server.filled(steps=range(1, 3))
    sent = [2]

    def send():
        first = sent[0]
        server.reports([report(first + i, first + i + 1) for i in range(3)])
        sent[0] = first + 3

    with beside(send):
        before = sent[0]
        made = copy()
        after = sent[0] + 3
    again = restored(made)
    count = seqs(again)
    assert before <= count <= after
    assert (count - 2) % 3 == 0
    assert again.series("loss", points=10_000).steps == list(range(1, count + 1))


def test_a_back_up_keeps_what_is_set_before_the_first_table(server, copy):
    server.filled()
    with closing(sqlite3.connect(copy())) as connection:
        assert connection.execute("PRAGMA page_size").fetchone() == (16384,)
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def test_nothing_is_ever_overwritten(server, settings, copy, tmp_path):
    server.filled()
    (tmp_path / "copy").write_text("precious")
    with pytest.raises(StoreUnusable, match="exists"):
        copy()
    copy("copy2")
    with pytest.raises(StoreUnusable, match="exists"):
        restore(tmp_path / "copy2", settings.folder / "collage.sqlite")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "collage.sqlite-wal").write_text("of another database")
    with pytest.raises(StoreUnusable, match="-wal exists"):
        restore(tmp_path / "copy2", tmp_path / "new" / "collage.sqlite")
    assert (tmp_path / "copy").read_text() == "precious"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_damage_is_seen_before_anything_is_put_in_place(server, copy, tmp_path):
    server.filled(steps=range(1, 200))
    made = copy()
    data = bytearray(made.read_bytes())
    data[16384 * 3 : 16384 * 3 + 64] = bytes(64)
    made.write_bytes(data)
    with pytest.raises(StoreUnusable, match=r"damaged|no back-up"):
        restore(made, tmp_path / "new" / "collage.sqlite")
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StoreUnusable, match="no back-up"):
        restore(tmp_path / "text", tmp_path / "new" / "collage.sqlite")


def test_a_back_up_of_a_newer_server_is_refused(server, copy, tmp_path):
    server.filled()
    made = copy()
    with closing(sqlite3.connect(made)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreUnusable, match="newer server"):
        restore(made, tmp_path / "new" / "collage.sqlite")


def told(verb, *arguments):
    return CliRunner().invoke(backup_verb, [verb, *map(str, arguments)])


@pytest.mark.slow
def test_the_verbs(server, settings, tmp_path, monkeypatch):
    server.filled()
    copy = tmp_path / "copy"
    done = told("make", copy, "--dir", settings.folder, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["runs"] == 1
    done = told("restore", copy, "--dir", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert "1 runs" in done.output
    assert (tmp_path / "new" / "collage.sqlite").exists()
    assert isinstance(told("make", tmp_path / "c2", "--dir", tmp_path / "none").exception, StoreUnusable)
    monkeypatch.setenv("COLLAGE_SERVER_DATABASE", "postgresql://localhost/collage")
    dump = told("make", tmp_path / "c3", "--dir", settings.folder)
    assert dump.exit_code == 1
    assert "pg_dump" in dump.output


@pytest.mark.slow
def test_a_drill_restores_aside_compares_and_leaves_nothing(server, settings, tmp_path):
    server.filled(steps=range(1, 21))
    server.app.state.collage.store.sealing.seal("r1", server.clock() + 1000.0)
    copies = tmp_path / "copies"
    copies.mkdir()
    done = told("make", copies / "one", "--drill", "--dir", settings.folder)
    assert done.exit_code == 0, done.output
    assert "restored aside: 1 runs compared by digest, 0 of them differ" in done.stdout
    assert "a loss now would cost 0 reports of 0 runs and of 0 whole runs" in done.stdout
    done = told("make", copies / "two", "--drill", "--json", "--dir", settings.folder)
    assert (done.exit_code, json.loads(done.stdout)["drill"]["compared"]) == (0, 1)
    assert not list(copies.glob("drill-*"))


@pytest.mark.slow
def test_a_drill_names_a_copy_that_differs_or_cannot_be_read_and_counts_what_came_since(server, copy, tmp_path):
    server.filled(steps=range(1, 21))
    restore(copy(), tmp_path / "aside" / "collage.sqlite")
    own = server.app.state.collage.store
    with closing(opened(tmp_path / "aside" / "collage.sqlite")) as aside:
        assert drill(own, aside, 10).problems == ()
        for checks, problem in (
            ("NULL", "run r1 differs"),
            ("x'0000'", "the copy cannot read run r1: run r1: report"),
        ):
            with closing(sqlite3.connect(aside.path)) as connection, connection:
                connection.execute(f"UPDATE report SET time = time + 1, checks = {checks}")
            [found] = drill(own, aside, 10).problems
            assert found.startswith(problem)
        server.reports([report(100, 21), report(101, 22)])
        server.run("r2")
        told = drill(own, aside, 10)
        assert (told.lost_reports, told.lost_in_runs, told.lost_runs, told.compared) == (2, 1, 1, 0)
