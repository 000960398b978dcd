"""The archiver's rounds: what it is told meanwhile, and what an archive that is away costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from collage_server.archiver import Archiver
from collage_server.errors import Busy


class Archive:
    """Runs with so many files to make each; `away`: it takes none. What is asked of it is kept."""

    def __init__(self, due):
        self.due, self.away = dict(due), False
        self.asked: list[str] = []
        self.sweeps = self.looked_through = 0
        self.meanwhile = lambda run_id: None
        self.may_seal = True

    @property
    def retention(self):
        return self

    def sealed_runs(self):
        self.looked_through += 1
        return list(self.due)

    finished = runs = retention
    verification = SimpleNamespace(suspects=list, due=lambda *_: [], problems=dict)

    def projects(self):
        return ["all"]

    def get(self, run_id):
        return SimpleNamespace(project=f"of {run_id}", state="running" if run_id == "live" else "finished")

    def archive(self, run_id):
        self.asked.append(run_id)
        if self.away:
            raise Busy("the archive is away", retry_after_seconds=1)
        self.meanwhile(run_id)
        self.due[run_id] -= 1
        return self.due[run_id] > 0

    def sweep(self, now):
        self.sweeps += 1
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
    archive = Archive({})
    tries = []

    def publish(project):
        tries.append(project)
        if len(tries) == 1:
            raise Busy("others change it", retry_after_seconds=1)

    archiver = archiver_of(archive, publish=publish)
    for _ in range(3):
        monkeypatch.setattr(archiver, "_publish_due", 0.0)
        archiver.do_due_work()
    assert tries == ["all", "all"]
