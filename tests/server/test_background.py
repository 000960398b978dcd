"""Threads beside the requests do what is due, survive errors and stop: the sealer, the archiver.

And what a server depends on: one state each, told once, and none taken for another.
"""

import logging
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from collage_server.archiver import Archiver
from collage_server.background import Sealer
from collage_server.dependencies import Dependency
from collage_server.errors import Busy, DatabaseAway, Gone
from collage_server.ingest.writer import JournalBounds
from collage_server.settings import FixedLimits
from sqlalchemy.exc import OperationalError

from collage_monitor import wire
from collage_monitor.command.status import _number_checks
from tests.server.conftest import running
from tests.waiting import PATIENCE_SECONDS, until


class Journals:
    """With so many parts due each; `refuses` raises where one cannot be sealed. What was sealed is remembered."""

    def __init__(self, due):
        self.due = due
        self.sealed = []
        self.error = None
        self.refuses = lambda run_id: None

    def runs(self):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return list(self.due)

    def seal(self, run_id, now, *, journal_full=False):
        self.refuses(run_id)
        if not self.due[run_id]:
            return False
        self.due[run_id] -= 1
        self.sealed.append((run_id, now))
        return True

    @contextmanager
    def sealer(self):
        """One that looks all the time."""
        bounds = JournalBounds(2**20, 2**20)
        sealer = Sealer(self.runs, self.seal, lambda _: 0, bounds, clock=lambda: 5.0, interval_seconds=0.001)
        sealer.start()
        yield
        sealer.stop(PATIENCE_SECONDS)
        count = threading.active_count()
        sealer.stop(PATIENCE_SECONDS)
        assert threading.active_count() == count


@pytest.mark.parametrize("error", [None, OSError("disk full")])
def test_every_journal_is_sealed_as_far_as_it_is_due_and_one_that_cannot_be_holds_up_no_other(error, caplog):
    store = Journals({"a": 2, "deleted": 1, "poison": 1, "b": 1})

    def refuses(run_id):
        if run_id == "deleted":
            store.due[run_id] = 0
            raise Gone("deleted")
        if run_id == "poison":
            raise ValueError("a statistic of a newer server")

    store.error, store.refuses = error, refuses
    with store.sealer():
        until(lambda: {run_id for run_id, due in store.due.items() if due} == {"poison"}, "the sealing of others")
    assert sorted(store.sealed) == [("a", 5.0), ("a", 5.0), ("b", 5.0)]
    assert "run poison cannot be sealed" in caplog.text


def test_a_database_that_is_away_is_one_line_and_no_traceback(caplog):
    store, rounds = Journals({"a": 1, "b": 1}), iter(range(40))

    def busy(_):
        if next(rounds, None) is not None:
            raise Busy("the database cannot do this now")

    store.refuses = busy
    with store.sealer():
        until(lambda: len(store.sealed) == 2, "the sealing of both once the database is there")
    (line,) = caplog.records
    assert (line.levelname, line.exc_info) == ("WARNING", None)
    assert line.getMessage().startswith("run a cannot be sealed; ")
    assert line.getMessage().endswith(": the database cannot do this now")


@pytest.mark.slow
def test_a_running_server_seals_a_finished_run(settings):
    """No answer that says nothing about the time or the state of the run is another one."""
    series = ("metric=edq_ratio", "metric=loss&axis=tokens", "metric=edq_ratio&layer=embedding.weight&points=2")
    others = ("heatmap?metric=lost_update_ratio", "histogram", "latest", "worst?k=2", "layers", "streams")
    paths = [f"/runs/r1/{asked}" for asked in (*(f"series?{query}" for query in series), *others)]
    with running(settings, limits=FixedLimits(seal_interval_seconds=0.01)) as server:
        server.filled()
        before = [server.get(path) for path in paths]
        server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
        until(lambda: server.store.journal.runs() == [], "an empty journal")
        assert [server.get(path) for path in paths] == before


class Archive:
    """Runs with so many files to make each; `away`: it takes none. What is asked of it is kept."""

    def __init__(self, due):
        self.due, self.away = dict(due), False
        self.asked: list[str] = []
        self.sweeps = self.looked_through = 0
        self.meanwhile = lambda run_id: None

    @property
    def retention(self):
        return self

    def sealed_runs(self):
        self.looked_through += 1
        return list(self.due)

    finished = runs = retention
    may_seal = True
    verification = SimpleNamespace(suspects=list, due=lambda *_: [], problems=dict)

    def projects(self):
        return ["all"]

    def get(self, run_id):
        return SimpleNamespace(project=f"of {run_id}", state="running" if run_id == "live" else "finished")

    def archive(self, run_id):
        self.asked.append(run_id)
        self.answer()
        self.meanwhile(run_id)
        self.due[run_id] -= 1
        return self.due[run_id] > 0

    def sweep(self, now):
        self.sweeps += 1
        self.answer()

    def answer(self):
        if self.away:
            raise Busy("the archive is away", retry_after_seconds=1)


def archiver_of(archive: Any, **more: Any):
    return Archiver(archive, archive, archive, clock=lambda: 0.0, interval_seconds=1.0, **more)


def test_what_is_told_of_a_run_while_it_is_archived_is_looked_at_again():
    archive = Archive({"r1": 1})
    archiver = archiver_of(archive)
    told = iter([True])
    archive.meanwhile = lambda run_id: archiver.tell(run_id) if next(told, False) else None
    archiver.do_due_work()
    assert archive.asked == ["r1", "r1"]


def test_while_the_archive_is_away_runs_wait_and_are_not_all_looked_through_again():
    archive = Archive({"r1": 2, "r2": 1})
    archiver = archiver_of(archive)
    archive.away = True
    for _ in range(5):
        archiver.do_due_work()
    assert (archive.looked_through, archive.sweeps) == (1, 1)
    assert archive.asked == ["r1", "r2", "r1", "r2"], "one a round, after the sweep's"
    assert archiver.away_seconds > 0
    archive.away = False
    archiver.do_due_work()
    assert archive.due == {"r1": 0, "r2": 0}
    assert archiver.away_seconds == 0


def test_projects_whose_runs_have_ended_are_published_and_once_an_hour_all(monkeypatch):
    archive = Archive({"r1": 1, "live": 1})
    published: list[str] = []
    archiver = archiver_of(archive, publish=published.append)
    archiver.do_due_work()
    assert published == ["all", "of r1"]
    archiver.tell("r1")
    archive.due["r1"] = 1
    archiver.do_due_work()
    assert len(published) == 2, "once a minute at most"
    monkeypatch.setattr(archiver, "_publish_due", 0.0)
    archiver.do_due_work()
    assert published == ["all", "of r1", "of r1"]


def test_a_project_that_cannot_be_published_is_tried_again(monkeypatch):
    publish = Mock(side_effect=[Busy("others change it", retry_after_seconds=1), None])
    archiver = archiver_of(Archive({}), publish=publish)
    for _ in range(3):
        monkeypatch.setattr(archiver, "_publish_due", 0.0)
        archiver.do_due_work()
    assert publish.call_args_list == [call("all")] * 2


def test_the_log_tells_each_change_once(caplog):
    now = [100.0]
    some = Dependency("the bucket", clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for some_second in range(3):
            now[0] = 100.0 + some_second
            some.fails(f"refused\n  {some_second}")
        assert some.away_seconds == 2.0
        for _ in range(2):
            some.works()
    assert some.away_seconds == 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "the bucket does not answer: refused 0",
        "the bucket answers again, after 2 s; its last error: refused 2",
    ]


def test_a_database_that_is_away_is_no_archive_that_is_away(caplog):
    archive = Archive({"r1": 1})
    archiver = archiver_of(archive)
    archive.meanwhile = Mock(side_effect=[DatabaseAway("not now", retry_after_seconds=1), None])
    with caplog.at_level(logging.WARNING):
        archiver.do_due_work()
    assert archiver.away_seconds == 0
    assert not caplog.records
    archiver.do_due_work()
    assert archive.asked == ["r1", "r1"], "the run waits"


def gone(*_):
    raise OperationalError("SELECT 1", {}, ConnectionError("server closed the connection at 10.0.0.7"))


@contextmanager
def lost_at_the_end(*_):
    """A claim whose connection is gone when it is given back."""
    yield True
    gone()


def test_a_connection_that_is_lost_at_a_seals_end_is_told_as_the_database(server, monkeypatch, caplog):
    """It was an ERROR with a traceback for each run."""
    server.filled(steps=range(1, 101))
    state = server.state
    monkeypatch.setattr(type(state.store), "_claim", lost_at_the_end)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            state.sealer.do_due_work()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING or record.exc_info]
    assert "cannot be sealed" not in caplog.text
    assert "the database does not answer: server closed the connection" in caplog.text


def test_a_database_that_is_away_is_one_state_everywhere(server, monkeypatch, caplog):
    state = server.state
    assert server.get("/readyz", wire.Health).away == []
    kind = type(state.store)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(kind, "_begin_reading", contextmanager(gone))
        for _ in range(5):
            with pytest.raises(Busy, match=r"send this again later$") as refused, state.store.reading():
                pytest.fail("nothing can be read")
            assert "10.0.0.7" not in refused.value.message
        assert server.client.get("/readyz").status_code == 503
        assert state.store.dependency.away_since is not None
    lines = [record.getMessage() for record in caplog.records if record.name == "collage_server.dependencies"]
    assert lines == ["the database does not answer: server closed the connection at 10.0.0.7"]
    state.dependencies[-1].fails("no such bucket")
    answer = server.get("/readyz", wire.Health)
    assert [entry.name for entry in answer.away] == [state.dependencies[-1].name]
    assert "bucket" not in server.client.get("/readyz").text, "errors may name hosts, and stay in the log"
    page = server.client.get("/metrics").text
    assert 'collage_server_dependency_away_seconds{dependency="the database"} 0.0' in page
    assert not [check for check in _number_checks({}, 0.0) if check.ok is False]
