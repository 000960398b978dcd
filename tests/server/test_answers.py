"""Answers are kept until their runs change, and only until then; an asker that has one is told so."""

import tracemalloc

import msgspec
import pytest
from collage_server.answer_cache import AnswerCache
from collage_server.store.reading.snapshot import Snapshot

from collage_monitor import wire
from tests.server.samples import STATISTICS, block, layer, report, watch
from tests.server.statements import statements_on
from tests.server.store.contract import LIMITS

METRICS = ("edq_ratio", "loss")
COMPARED = "/compare?run=r1&metric=edq_ratio"
PATHS = (
    *("/runs/r1/series?metric=edq_ratio", "/runs/r1/series?metric=loss", "/runs/r1/heatmap?metric=edq_ratio"),
    *("/runs/r1/histogram", "/runs/r1/latest", "/runs/r1/worst", f"{COMPARED}&run=r2"),
)


def fetch(server, path, etag=None):
    headers = {"If-None-Match": etag} if etag else {}
    return server.client.get("/api/v1" + path, headers=headers)


@pytest.fixture
def two(server):
    """Runs r1 and r2, a stream each: s1 and s2."""
    for number in (1, 2):
        server.filled(f"r{number}", f"s{number}")
    return server


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_changes_with_its_run_and_not_before(two, path, monkeypatch):
    first = fetch(two, path)
    unchanged = fetch(two, path, first.headers["etag"])
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert unchanged.headers["etag"] == first.headers["etag"]
    with monkeypatch.context() as patch:
        patch.setattr(two.store.points, "snapshot", lambda: 1 / 0)
        again = fetch(two, path)
        assert (again.status_code, again.content) == (200, first.content), "kept: the store is not asked"
    values = block(70)
    values[STATISTICS.index("intended_effective_sum")] *= 0.5
    two.reports([report(9, 70, values=values)], "s1")
    later = fetch(two, path, first.headers["etag"])
    assert later.status_code == 200
    assert later.headers["etag"] != first.headers["etag"]
    assert later.content != first.content


def test_of_a_comparison_only_the_run_or_the_curve_that_changed_is_read_again(two, monkeypatch):
    read: list[str] = []
    newest = Snapshot.newest_scalars

    def counted(now, run_ids, count):
        read.extend(run_ids)
        return newest(now, run_ids, count)

    monkeypatch.setattr(Snapshot, "newest_scalars", counted)
    other = {"metric": "grad_norm", "points": 2}
    alone = two.compare("r1", "r2", **other)
    two.reports([report(9, 70)], "s1")
    read.clear()
    first = two.compare("r1", "r2", metric="edq_ratio")
    assert (read, [run.reports for run in first]) == (["r1"], [6, 5])
    read.clear()
    second = two.compare("r1", "r2", **other)
    assert (read, [run.reports for run in second]) == ([], [6, 5])
    assert [run.merged for run in second] == [run.merged for run in first]
    assert second[0].merged != alone[0].merged
    assert second[1] == alone[1]


@pytest.mark.slow
def test_names_states_and_attempts_change_an_answer_too(server, clock):
    server.filled("r1", "s1")
    etags = [fetch(server, COMPARED).headers["etag"]]
    clock.now += 1
    server.send("PATCH", "/runs/r1", wire.RunUpdate(name="other"), wire.Run)
    etags.append(fetch(server, COMPARED).headers["etag"])
    server.attempt(launch_id="launch-2", first_step=30)
    etags.append(fetch(server, COMPARED).headers["etag"])
    clock.now += 700
    last = fetch(server, COMPARED)
    assert len({*etags, last.headers["etag"]}) == 4
    assert '"stale"' in last.text
    server.reports([report(9, 70)], "s1")
    before = fetch(server, COMPARED)
    clock.now -= 5
    server.send("PATCH", "/runs/r1", wire.RunUpdate(name="by a clock that lags behind the newest report"), wire.Run)
    after = fetch(server, COMPARED)
    assert after.headers["etag"] != before.headers["etag"]
    assert '"by a clock' in after.text


def test_an_answer_holds_runs_and_metrics_in_the_order_asked_for(two):
    for order in (["r1", "r2"], ["r2", "r1"]):
        assert [run.run_id for run in two.compare(*order, metric="loss")] == order
    one, other = ("/runs/r1/series?metric={}&metric={}".format(*names) for names in (METRICS, METRICS[::-1]))
    for path, (metric, more) in ((one, METRICS), (other, METRICS[::-1])):
        series = two.get(path, wire.Series)
        assert (series.metric, list(series.more)) == (metric, [more])
    assert fetch(two, other, fetch(two, one).headers["etag"]).status_code == 200
    etag = fetch(two, "/runs/r1/series?metric=loss&points=9").headers["etag"]
    swapped = fetch(two, "/runs/r1/series?points=9&metric=loss", etag)
    assert swapped.status_code == 304, "the order of other parameters does not matter"


@pytest.mark.slow
def test_so_do_layers_a_strategy_and_retention(server, clock):
    server.store.sealing.limits = LIMITS
    server.filled("r1", "s1", steps=range(1, 81))
    path = "/runs/r1/heatmap?metric=edq_ratio&points=100"
    answers = [fetch(server, path)]
    for change in (
        lambda: server.stream("r1", stream_id="s2", rank=1, world_size=2, layers=[layer("head.weight")]),
        lambda: server.stream("r1", stream_id="s1", watch=watch("kahan")),
        server.seal,
        lambda: server.store.retention.expire("r1", {1: clock.now + 1e9}),
        lambda: server.store.retention.expire("r1", {16: clock.now + 1e9}),
    ):
        change()
        answers.append(fetch(server, path))
    etags = [answer.headers["etag"] for answer in answers]
    assert etags[2] == etags[3], "sealing changes nothing that readers see"
    assert len(set(etags)) == 5
    heatmaps = [wire.decode_message(answer.content, wire.Heatmap, wire.JSON) for answer in answers]
    assert [len(entry.layers) for entry in heatmaps] == [3, 4, 4, 4, 4, 4]
    assert len(heatmaps[-1].steps) < len(heatmaps[-2].steps) < len(heatmaps[-3].steps), "coarse points went, too"


def test_the_newest_values_of_a_run_read_once_what_it_is_made_of_and_nothing_once_it_is_deleted(server):
    server.filled()
    with statements_on(server.store.engine) as statements:
        assert len(server.get("/runs/r1/latest", wire.Latest).worst) == 3
    assert sum("FROM stream JOIN run" in statement for statement in statements) == 1
    etag = fetch(server, PATHS[0]).headers["etag"]
    server.send("DELETE", "/runs/r1", kind=wire.Deleted)
    assert fetch(server, PATHS[0], etag).status_code == 410
    assert fetch(server, COMPARED).status_code == 410


@pytest.mark.slow
def test_a_page_of_the_list_reads_its_runs_together(server):
    """Each run took a snapshot and thirty statements of its own."""
    server.stop_threads()
    for place in range(12):
        server.filled(f"r{place}", f"s{place}")
        server.finish(f"r{place}")

    def asked(limit):
        with statements_on(server.store.engine) as statements:
            runs = server.get(f"/runs?limit={limit}", wire.RunPage).runs
        assert len(runs) == limit
        assert all(run.latest["edq_ratio"] is not None for run in runs)
        return sum("FROM run_latest" in statement or "_chunk" in statement for statement in statements)

    few, many = asked(2), asked(12)
    assert many - few <= 12, "one statement a run, for its step"
    assert asked(12) == asked(2), "nothing a run once its newest step is known"


@pytest.mark.slow
def test_chunks_of_one_run_or_of_many_are_the_same_statement(server):
    """A statement for each number of spans was kept by SQLAlchemy and by the database: megabytes each."""
    server.stop_threads()
    names = [f"r{place}" for place in range(5)]
    for name in names:
        server.filled(name, f"s-{name}")
        server.seal(name, journal_full=True)
    kinds = []
    for count in (1, 2, 5):
        with statements_on(server.store.engine) as statements:
            server.compare(*names[:count], metric="edq_ratio")
        kinds.append({statement for statement in statements if statement.startswith("WITH w")})
    assert kinds[0]
    assert kinds[0] == kinds[1] == kinds[2]


def test_the_cache_drops_the_least_recently_used_beyond_its_bytes():
    cache = AnswerCache(2 * (400 + 8) + 4)
    made: list[str] = []

    def get(key):
        def make():
            made.append(key)
            return "x" * 6

        return bytes(cache.encoded(key, make))

    for key in ("a", "b", "a", "c", "a", "b"):
        assert msgspec.json.decode(get(key)) == "x" * 6
    assert made == ["a", "b", "c", "b"]
    assert bytes(cache.encoded("big", lambda: "y" * 999)) == bytes(cache.encoded("big", lambda: "y" * 999))
    get("a")
    assert made == ["a", "b", "c", "b"]


def test_small_answers_of_a_run_of_many_launches_take_what_is_counted():
    attempts = tuple((number, 10 * number) for number in range(500))
    cache = AnswerCache(2**20)
    tracemalloc.start()
    try:
        for number in range(3000):
            cache.put(("/series", (number, *attempts)), "x" * 100)
        assert tracemalloc.get_traced_memory()[0] < 1.2 * 2**20
    finally:
        tracemalloc.stop()
