"""The sealer's thread: looks, seals what is due, survives errors, and stops."""

from __future__ import annotations

import threading

import pytest
from collage_server.background import Sealer
from collage_server.errors import Busy, Gone
from collage_server.ingest.writer import JournalBounds
from collage_server.settings import FixedLimits, Settings

from collage_monitor import wire
from tests.server.conftest import running
from tests.waiting import PATIENCE_SECONDS, until


class Store:
    """Journals with so many parts due; remembers what was sealed."""

    def __init__(self, due):
        self.due = due
        self.sealed = []
        self.done = threading.Event()
        self.error = None

    def runs(self):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if not any(self.due.values()):
            self.done.set()
        return list(self.due)

    def seal(self, run_id, now, *, journal_full=False):
        if run_id == "deleted":
            self.due[run_id] = 0
            raise Gone("deleted")
        if not self.due[run_id]:
            return False
        self.due[run_id] -= 1
        self.sealed.append((run_id, now))
        return True

    def bytes_of(self, run_id):
        return 0


def sealer_of(store):
    bounds = JournalBounds(2**20, 2**20)
    return Sealer(store.runs, store.seal, store.bytes_of, bounds, clock=lambda: 5.0, interval_seconds=0.001)


@pytest.mark.parametrize("error", [None, OSError("disk full")])
def test_every_journal_is_sealed_as_far_as_it_is_due(error):
    store = Store({"a": 2, "deleted": 1, "b": 1})
    store.error = error
    sealer = sealer_of(store)
    sealer.start()
    assert store.done.wait(PATIENCE_SECONDS)
    sealer.stop(5.0)
    assert sorted(store.sealed) == [("a", 5.0), ("a", 5.0), ("b", 5.0)]
    count = threading.active_count()
    sealer.stop(5.0)
    assert threading.active_count() == count


class WithPoison(Store):
    """Run "a" cannot be sealed, whatever is tried."""

    def seal(self, run_id, now, *, journal_full=False):
        if run_id == "a":
            raise ValueError("a statistic of a newer server")
        return super().seal(run_id, now, journal_full=journal_full)


def test_a_run_that_cannot_be_sealed_holds_up_no_other(caplog):
    store = WithPoison({"a": 1, "b": 1, "c": 1})
    sealer = sealer_of(store)
    sealer.start()
    until(lambda: len(store.sealed) == 2, "the sealing of the two others")
    sealer.stop(PATIENCE_SECONDS)
    assert sorted(run_id for run_id, _ in store.sealed) == ["b", "c"]
    assert "run a cannot be sealed" in caplog.text


class WithBusyDatabase(Store):
    """A database that is away for so many rounds."""

    def __init__(self, due, rounds):
        super().__init__(due)
        self.rounds = rounds

    def seal(self, run_id, now, *, journal_full=False):
        if self.rounds:
            self.rounds -= 1
            raise Busy("the database cannot do this now")
        return super().seal(run_id, now, journal_full=journal_full)


def test_a_database_that_is_away_is_one_line_and_no_traceback(caplog):
    store = WithBusyDatabase({"a": 1, "b": 1}, rounds=40)
    sealer = sealer_of(store)
    sealer.start()
    until(lambda: len(store.sealed) == 2, "the sealing of both once the database is there")
    sealer.stop(PATIENCE_SECONDS)
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert line.exc_info is None
    assert line.getMessage() == (
        "run a cannot be sealed; its journal keeps everything, the others go on: the database cannot do this now"
    )


@pytest.mark.slow
def test_a_running_server_seals_a_finished_run(tmp_path):
    with running(Settings(folder=tmp_path, no_auth=True), limits=FixedLimits(seal_interval_seconds=0.01)) as server:
        server.filled()
        before = [server.get(path) for path in paths()]
        server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
        store = server.app.state.collage.store
        until(lambda: store.journal.runs() == [], "an empty journal")
        assert [server.get(path) for path in paths()] == before


def paths():
    """Answers that say nothing about the time or the state of the run."""
    return (
        "/runs/r1/series?metric=edq_ratio",
        "/runs/r1/series?metric=loss&axis=tokens",
        "/runs/r1/series?metric=edq_ratio&layer=embedding.weight&points=2",
        "/runs/r1/heatmap?metric=lost_update_ratio",
        "/runs/r1/histogram",
        "/runs/r1/latest",
        "/runs/r1/worst?k=2",
        "/runs/r1/layers",
        "/runs/r1/streams",
    )
