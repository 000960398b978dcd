"""A curve that is followed with a cursor: all of it, once, whatever arrives late, is sealed or hidden meanwhile."""

import base64

import msgspec
import pytest

from collage_monitor import wire
from tests.server.samples import report
from tests.server.store.contract import LIMITS

pytestmark = pytest.mark.slow

QUESTIONS = (
    {"metric": "edq_ratio"},
    {"metric": "edq_ratio", "layer": "blocks.0.weight", "from": 3},
    {"metric": "lost_update_ratio", "pattern": "blocks.*", "axis": "tokens"},
    {"metric": "edq_ratio", "rank": 1},
    {"metric": "loss", "to": 70},
    {"metric": "edq_ratio", "from": 60, "to": 70},
)


class Follower:
    """Does what a reader does: adds what continues, starts again where it does not."""

    def __init__(self, server, question):
        self.server, self.question = server, question
        self.cursor = ""
        self.steps: list[int] = []
        self.values: list[wire.Number | None] = []
        self.begun = 0

    def look(self):
        series = self.server.series(**self.question, points=10_000, cursor=self.cursor)
        if not series.continues:
            self.steps, self.values = [], []
            self.begun += 1
        self.steps += series.steps
        self.values += series.values
        self.cursor = series.cursor
        return len(series.steps)


@pytest.fixture
def two(server):
    server.app.state.collage.store.sealing.limits = LIMITS
    server.ranks(2)
    return server


def send(server, steps, rank):
    server.reports([report(step, step, rank=rank) for step in steps], f"s{rank}")


def test_all_of_it_comes_once(two):
    readers = [Follower(two, question) for question in QUESTIONS]
    for start in range(1, 101, 13):
        for rank in range(2):
            send(two, range(start, start + 13), rank)
        if start % 3 == 0:
            two.seal()
        for reader in readers:
            reader.look()
            assert reader.look() == 0, "nothing new"
    for reader in readers:
        whole = two.series(**reader.question, points=10_000)
        assert (reader.steps, reader.values) == (whole.steps, whole.values)
        assert reader.begun == 1
        assert whole.cursor is None


def test_a_step_is_told_when_every_rank_has_reached_it_and_a_late_report_makes_it_begin_again(two):
    reader = Follower(two, QUESTIONS[0])
    assert reader.look() == 0
    send(two, range(1, 11), 0)
    send(two, range(1, 6), 1)
    assert reader.look() == 5
    send(two, range(6, 9), 1)
    assert reader.look() == 3
    assert (reader.steps, reader.begun) == (list(range(1, 9)), 1)
    send(two, [10], 1)
    reader.look()
    send(two, [9], 1)
    reader.look()
    whole = two.series("edq_ratio", points=10_000, to=10)
    assert (reader.steps, reader.values, reader.begun) == (whole.steps, whole.values, 2)


@pytest.mark.parametrize("looks", [(False, True), (True, False), (True, True)])
def test_a_run_that_is_over_waits_for_no_rank(two, looks):
    """Whether it is read before it is over, before it is sealed, or afterwards."""
    reader = Follower(two, QUESTIONS[0])
    send(two, range(1, 16), 0)
    send(two, range(1, 11), 1)
    if looks[0]:
        assert (reader.look(), two.get("/runs/r1/latest", wire.Latest).step) == (10, 10)
    two.clock.now += 1.0  # What other threads keep of a run is told from later by when it changed.
    two.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
    if looks[1]:
        reader.look()
        assert two.get("/runs/r1/latest", wire.Latest).step == 15
    two.seal()
    reader.look()
    whole = two.series("edq_ratio", points=10_000)
    assert (reader.steps, reader.values, reader.begun) == (whole.steps, whole.values, 1)
    assert two.get("/runs/r1/latest", wire.Latest).step == whole.steps[-1] == 15


@pytest.mark.parametrize("question", [QUESTIONS[0], QUESTIONS[4]])
def test_so_does_a_newer_attempt(two, question):
    reader = Follower(two, question)
    for rank in range(2):
        send(two, range(1, 41), rank)
    two.seal()
    reader.look()
    two.attempt(launch_id="launch-2", first_step=21)
    two.stream(stream_id="s2", launch_id="launch-2")
    two.reports([report(i, 21 + i, rank=2) for i in range(5)], "s2")
    reader.look()
    whole = two.series(**question, points=10_000)
    assert (reader.steps, reader.values) == (whole.steps, whole.values)
    assert (reader.steps[-1], reader.begun) == (25, 2)


def test_what_is_new_is_merged_to_the_points_asked_for(two):
    for rank in range(2):
        send(two, range(1, 11), rank)
    first = two.series("edq_ratio", points=2, cursor="")
    assert (first.steps, first.continues) == ([5, 10], False)
    for rank in range(2):
        send(two, range(11, 31), rank)
    more = two.series("edq_ratio", points=2, cursor=first.cursor)
    assert (more.first_steps, more.steps, more.continues) == ([11, 21], [20, 30], True)


def test_another_cursor_and_one_that_was_tampered_with_are_refused(two):
    """The latter's revision is the run's, so nothing but its form is looked at."""
    cursor = two.series("loss", cursor="").cursor
    _, told, revision = msgspec.msgpack.decode(base64.urlsafe_b64decode(cursor))
    tampered = (msgspec.msgpack.encode([step, told, revision]) for step in (2**63, 2**53 + 1, -2, 1.5))
    for other in ("zz", "AAAA", "%00", "k5M=", *(base64.urlsafe_b64encode(made).decode() for made in tampered)):
        assert two.get(f"/runs/r1/series?metric=loss&cursor={other}", status=422).field == "cursor", other
