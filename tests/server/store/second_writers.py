"""What every backend must do about who logs to a run beside its training: evaluators, late, resumed or several."""

import pytest
from collage_server.errors import Conflict, Unprocessable
from collage_server.store import RunQuery, Selection, schema
from collage_server.summariser import Summariser

from collage_monitor import wire
from tests.server.reads import model_points, scalar_points
from tests.server.store.sending import append, fill, launch, register, send
from tests.server.store.stores import NOW, rows, seal_all

NAME = "evaluator/accuracy"
STALE = 600.0
"""Seconds of silence of the stores that these tests get."""


def trained(store, last_step=40):
    """A training up to a step, a report a step, at NOW."""
    send(store, fill(store), range(1, last_step + 1))


def launched(store, stream_id, role="evaluator", first_step=1):
    """A launch beside the training, with its one stream."""
    launch_id = f"launch of {stream_id}".replace(" ", "-")
    create = wire.AttemptCreate(launch_id=launch_id, first_step=first_step, role=role)
    attempt = store.streams.create_attempt("r1", create, NOW)
    store.streams.create_stream("r1", wire.StreamCreate(stream_id=stream_id, launch_id=launch_id), NOW)
    return attempt


def log(store, stream_id, *places, first_seq=0, now=NOW, name=NAME):
    """Log (step, value) pairs, a report each."""
    stream = store.streams.stream_record(stream_id)
    for seq, (step, value) in enumerate(places, first_seq):
        append(store, stream, wire.Report(seq=seq, step=step, time=now, scalars={name: value}), now=now)


def curve(store, name=NAME):
    """The points of a logged name, as (step, value) pairs."""
    points = scalar_points(store, "r1", [name], Selection())[name]
    return list(zip(points.steps.tolist(), points.values.tolist(), strict=True))


class SecondWritersContract:
    """Subclasses give the fixture `store`."""

    def test_it_hides_nothing_and_no_resume_hides_it(self, store):
        trained(store)
        assert launched(store, "e0", first_step=3).attempt == -1
        log(store, "e0", (3, 0.1), (35, 0.5), (8, 0.2))
        assert curve(store) == [(3, 0.1), (8, 0.2), (35, 0.5)]
        assert [step for step, _ in curve(store, "loss")] == list(range(1, 41))
        send(store, launch(store, 2, 20, "s1"), range(20, 26))
        assert curve(store) == [(3, 0.1), (8, 0.2), (35, 0.5)]
        assert [step for step, _ in curve(store, "loss")] == list(range(1, 26))
        assert model_points(store, "r1", ["lost"], Selection()).steps.tolist() == list(range(1, 26))
        record = store.runs.get("r1")
        assert (record.last_step, record.last_attempt) == (25, 2)
        assert [attempt.attempt for attempt in record.attempts] == [1, 2]
        assert record.scalars[NAME] == wire.LoggedScalar(step=35, value=0.5)

    @pytest.mark.parametrize("seals", [False, True])
    def test_one_that_resumes_replaces_what_it_says_again_and_no_more(self, store, seals):
        trained(store)
        launched(store, "e0")
        log(store, "e0", (3, 0.1), (8, 0.2), (35, 0.5))
        if seals:
            seal_all(store, now=NOW + STALE + 1)
        assert launched(store, "e1", first_step=8).attempt == -2
        log(store, "e1", (8, 0.3), (12, 0.4))
        if seals:
            seal_all(store, now=NOW + STALE + 1)
        assert curve(store) == [(3, 0.1), (8, 0.3), (12, 0.4), (35, 0.5)]
        assert store.runs.get("r1").scalars[NAME] == wire.LoggedScalar(step=35, value=0.5)
        log(store, "e1", (36, 0.6), first_seq=2)
        assert store.runs.get("r1").scalars[NAME] == wire.LoggedScalar(step=36, value=0.6)

    def test_two_at_once_are_one_curve_and_two_roles_are_two(self, store):
        trained(store)
        launched(store, "e0")
        launched(store, "e1")
        launched(store, "w0", "reward-worker")
        for place, step in enumerate(range(2, 40, 2)):
            log(store, f"e{place % 2}", (step, step / 100), first_seq=place // 2)
            log(store, "w0", (step, -1.0), first_seq=place, name="reward-worker/accuracy")
        assert curve(store) == [(step, step / 100) for step in range(2, 40, 2)]
        assert curve(store, "reward-worker/accuracy") == [(step, -1.0) for step in range(2, 40, 2)]
        told = [event for event in store.events.read("r1", 0, 100).events if event.attempt and event.attempt < 0]
        assert [event.text.partition(" ")[0] for event in told] == ["evaluator", "reward-worker"]

    def test_a_run_that_has_ended_stays_as_it_ended_and_takes_what_comes(self, store):
        trained(store)
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        seal_all(store, now=NOW)
        before = store.runs.get("r1")
        later = NOW + 1e6
        launched(store, "e0", first_step=5)
        log(store, "e0", (5, 0.1), (6, 0.2), now=later)
        seal_all(store, now=later + 1)
        assert store.journal.runs() == ["r1"]
        log(store, "e0", (7, 0.3), first_seq=2, now=later + 2)
        assert store.runs.revisions(["r1"])["r1"].reports == before.reports + 3
        seal_all(store, now=later + STALE + 3)
        assert store.journal.runs() == []
        assert curve(store) == [(5, 0.1), (6, 0.2), (7, 0.3)]
        after = store.runs.get("r1")
        for name in ("state", "updated_at", "last_report_at", "last_step", "first_step", "first_time", "attempts"):
            assert getattr(after, name) == getattr(before, name), name
        assert rows(store, schema.scalar_chunk, schema.scalar_chunk.c.name == NAME) <= 1

    def test_it_is_no_sign_of_the_trainings_life(self, store):
        trained(store)
        launched(store, "e0", first_step=5)
        later = NOW + STALE + 1
        log(store, "e0", (5, 0.1), now=later)
        due, record = store.summaries.due_points(10)["r1"], store.runs.get("r1")
        assert (due.updated_at, due.reports) == (record.updated_at, record.reports)
        Summariser(store).keep_points()
        assert store.summaries.due_points(10) == {}, "what is derived of the run is up to date again"
        record = store.runs.get("r1")
        assert (record.updated_at, record.last_report_at) == (NOW, NOW)
        assert store.runs.revisions(["r1"])["r1"].updated_at == NOW
        found = {state: store.runs.page(RunQuery(state=state), later, STALE).runs for state in ("running", "stale")}
        assert [run.run_id for run in found["stale"]] == ["r1"]
        assert found["running"] == []
        with store.points.snapshot() as snapshot:
            assert [run.run_id for run in snapshot.live_runs(None, NOW, None, 10).runs] == ["r1"]
            assert snapshot.live_runs(None, later, None, 10).runs == []

    def test_it_cannot_measure_and_does_not_count_as_a_launch_that_never_forbids(self, store):
        store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
        launched(store, "e0")
        with pytest.raises(Unprocessable, match="only logs"):
            register(store, "e1", launch_id="launch-of-e0")
        store.runs.create("p", wire.RunCreate(run_id="r1", resume="never"), NOW)
        launch(store, 1, 1)
        with pytest.raises(Conflict):
            store.runs.create("p", wire.RunCreate(run_id="r1", resume="never"), NOW)
