"""What a server depends on: one state each, told once, and none taken for another."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
from collage_server.dependencies import Dependency
from collage_server.errors import Busy, DatabaseAway
from sqlalchemy.exc import OperationalError

from collage_monitor import wire
from collage_monitor.command.status import _number_checks
from tests.server.test_archiver import Archive, archiver_of


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

    def away(_):
        raise DatabaseAway("the database cannot do this now", retry_after_seconds=1)

    archive.meanwhile = away
    with caplog.at_level(logging.WARNING):
        archiver.do_due_work()
    assert archiver.away_seconds == 0
    assert not caplog.records
    archive.meanwhile = lambda run_id: None
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
    state = server.app.state.collage
    monkeypatch.setattr(type(state.store), "_claim", lost_at_the_end)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            state.sealer.do_due_work()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING or record.exc_info]
    assert "cannot be sealed" not in caplog.text
    assert "the database does not answer: server closed the connection" in caplog.text


def test_a_database_that_is_away_is_one_state_everywhere(server, monkeypatch, caplog):
    state = server.app.state.collage
    assert server.get("/readyz", wire.Health).away == []
    kind = type(state.store)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(kind, "_begin_reading", contextmanager(gone))
        for _ in range(5):
            with pytest.raises(Busy, match=r"send this again later$"), state.store.reading():
                pytest.fail("nothing can be read")
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
