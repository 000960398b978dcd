"""What one project may hold: refused with 422 and the limit, and no other project feels it."""

from __future__ import annotations

import pytest
from collage_server.auth.quotas import Quotas
from collage_server.errors import Unprocessable
from collage_server.settings import FixedLimits
from collage_server.store import SqliteStore

from collage_monitor import wire
from tests.server.guarded import guarded_server
from tests.server.statements import statements_on


def create(guarded, run_id, project="p", tags=()):
    message = wire.RunCreate(run_id=run_id, tags=list(tags))
    return guarded.ask("POST", f"/api/v1/projects/{project}/runs", message=message)


def limit_of(answer):
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    return error["field"], error["limit"]


def test_runs(tmp_path):
    with guarded_server(tmp_path, runs_per_project=2) as guarded:
        assert create(guarded, "a").status_code == 201
        assert create(guarded, "b").status_code == 201
        assert limit_of(create(guarded, "c")) == ("runs_per_project", 2)
        assert create(guarded, "a").status_code == 200, "resuming is always allowed"
        assert create(guarded, "c", project="q").status_code == 201
        guarded.ask("DELETE", "/api/v1/runs/a")
        assert create(guarded, "d").status_code == 201


def test_tags_count_once_however_many_runs_bear_them(tmp_path):
    with guarded_server(tmp_path, FixedLimits(tags_per_project=3)) as guarded:
        assert create(guarded, "a", tags=["x", "y"]).status_code == 201
        assert create(guarded, "b", tags=["x", "y", "z"]).status_code == 201
        assert limit_of(create(guarded, "c", tags=["w"])) == ("tags_per_project", 3)
        assert limit_of(create(guarded, "a", tags=["w"])) == ("tags_per_project", 3)
        for tags, status in ((["w"], 422), (["z"], 200)):
            answer = guarded.ask("PATCH", "/api/v1/runs/a", message=wire.RunUpdate(tags=tags))
            assert answer.status_code == status


def test_layers(tmp_path):
    with guarded_server(tmp_path, FixedLimits(layers_per_project=5)) as guarded:
        guarded.fill("p", "a")
        assert create(guarded, "b").status_code == 201
        guarded.fill("p", "b")
        assert limit_of(create(guarded, "c")) == ("layers_per_project", 5)


@pytest.mark.parametrize(
    ("bounds", "advice"),
    [
        ({"runs_per_project": 1}, "start the server with a higher COLLAGE_SERVER_RUNS_PER_PROJECT"),
        ({"limits": FixedLimits(tags_per_project=1)}, "put new ones into another project"),
        ({"limits": FixedLimits(layers_per_project=1)}, "put new ones into another project"),
    ],
)
def test_the_message_says_what_to_do(tmp_path, bounds, advice):
    with guarded_server(tmp_path, **bounds) as guarded:
        guarded.fill("p", "a")
        create(guarded, "b")
        message = create(guarded, "c", tags=["x", "y"]).json()["error"]["message"]
        assert message.endswith(f"delete runs of it, or {advice}")


def test_creating_a_run_costs_the_same_in_a_project_of_many(tmp_path):
    """Runs, tags and layers of the whole project were counted for each: 4.8 ms became 10."""

    def rows_read(guarded, run_id):
        with statements_on(guarded.app.state.collage.store.engine) as asked:
            assert create(guarded, run_id, tags=["x"]).status_code == 201
        return [statement for statement in asked if "count(" in statement or "sum(" in statement]

    with guarded_server(tmp_path) as guarded:
        assert len(rows_read(guarded, "first")) == 3
        for i in range(20):
            assert rows_read(guarded, f"r{i}") == []


class Passing:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_count_is_remembered_below_half_of_the_limit_for_seconds(tmp_path):
    time, counts = Passing(), []
    store = SqliteStore(tmp_path / "unopened.sqlite", stale_after_seconds=600.0).access
    quotas = Quotas(10, FixedLimits(), store, monotonic=time)

    def adding(held):
        def count():
            counts.append(held)
            return held

        quotas.check("p", "runs", 1, count)

    for held in range(1, 7):
        adding(held)
    assert counts == [1, 6], "up to the half of it nothing was counted again"
    for held in range(7, 11):
        adding(held)
    assert counts == [1, 6, 7, 8, 9, 10]
    with pytest.raises(Unprocessable):
        adding(11)
    other = Quotas(10, FixedLimits(), store, monotonic=time)
    other.check("p", "runs", 1, lambda: 2)
    time.now = 11.0
    with pytest.raises(Unprocessable):
        other.check("p", "runs", 1, lambda: 12)
