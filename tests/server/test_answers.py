"""Answers are kept until their runs change, and only until then; an asker that has one is told so."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from collage_server.answer_cache import AnswerCache
from collage_server.store.reading.snapshot import Snapshot

from collage_monitor import wire
from tests.server.samples import STATISTICS, block, layer, report, watch
from tests.server.statements import statements_on
from tests.server.store.contract import LIMITS
from tests.waiting import PATIENCE_SECONDS

PATHS = (
    "/runs/r1/series?metric=edq_ratio",
    "/runs/r1/series?metric=loss",
    "/runs/r1/heatmap?metric=edq_ratio",
    "/runs/r1/histogram",
    "/runs/r1/latest",
    "/runs/r1/worst",
    "/compare?run=r1&run=r2&metric=edq_ratio",
)


def fetch(server, path, etag=None):
    headers = {"If-None-Match": etag} if etag else {}
    return server.client.get("/api/v1" + path, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_changes_with_its_run_and_not_before(server, path, monkeypatch):
    server.filled("r1", "s1")
    server.filled("r2", "s2")
    first = fetch(server, path)
    unchanged = fetch(server, path, first.headers["etag"])
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert unchanged.headers["etag"] == first.headers["etag"]
    store = server.app.state.collage.store
    with monkeypatch.context() as patch:
        patch.setattr(store.points, "snapshot", lambda: 1 / 0)
        again = fetch(server, path)
        assert (again.status_code, again.content) == (200, first.content), "kept: the store is not asked"
    values = block(70)
    values[STATISTICS.index("intended_effective_sum")] *= 0.5
    server.reports([report(9, 70, values=values)], "s1")
    later = fetch(server, path, first.headers["etag"])
    assert later.status_code == 200
    assert later.headers["etag"] != first.headers["etag"]
    assert later.content != first.content


def test_in_a_comparison_only_the_run_that_changed_is_read_again(server, monkeypatch):
    server.filled("r1", "s1")
    server.filled("r2", "s2")
    path = "/compare?run=r1&run=r2&metric=edq_ratio"
    fetch(server, path)
    server.reports([report(9, 70)], "s1")
    read: list[str] = []
    newest = Snapshot.newest_scalars

    def counted(now, run_ids, count):
        read.extend(run_ids)
        return newest(now, run_ids, count)

    monkeypatch.setattr(Snapshot, "newest_scalars", counted)
    answer = wire.decode_message(fetch(server, path).content, wire.Comparison, wire.JSON)
    assert read == ["r1"]
    assert [run.reports for run in answer.runs] == [6, 5]


def test_another_curve_of_the_same_runs_reads_only_the_curve(server, monkeypatch):
    server.filled("r1", "s1")
    server.filled("r2", "s2")
    paths = [f"/compare?run=r1&run=r2&{more}" for more in ("metric=edq_ratio", "metric=grad_norm&points=2")]
    with monkeypatch.context() as patch:
        alone = wire.decode_message(fetch(server, paths[1]).content, wire.Comparison, wire.JSON)
        server.reports([report(9, 70)], "s1")
        first = wire.decode_message(fetch(server, paths[0]).content, wire.Comparison, wire.JSON)
        patch.setattr(Snapshot, "newest_scalars", lambda *_: 1 / 0)
        second = wire.decode_message(fetch(server, paths[1]).content, wire.Comparison, wire.JSON)
    assert [run.reports for run in second.runs] == [6, 5]
    assert [run.merged for run in second.runs] == [run.merged for run in first.runs]
    assert second.runs[0].merged != alone.runs[0].merged
    assert second.runs[1] == alone.runs[1]


@pytest.mark.slow
def test_names_states_and_attempts_change_an_answer_too(server, clock):
    server.filled("r1", "s1")
    path = "/compare?run=r1&metric=edq_ratio"
    etags = [fetch(server, path).headers["etag"]]
    clock.now += 1
    server.send("PATCH", "/runs/r1", wire.RunUpdate(name="other"), wire.Run)
    etags.append(fetch(server, path).headers["etag"])
    server.attempt(launch_id="launch-2", first_step=30)
    etags.append(fetch(server, path).headers["etag"])
    clock.now += 700
    etags.append(fetch(server, path).headers["etag"])
    assert len(set(etags)) == 4
    assert '"stale"' in fetch(server, path).text


def test_a_change_by_a_clock_that_lags_behind_the_newest_report_is_one(server, clock):
    server.filled("r1", "s1")
    before = fetch(server, "/compare?run=r1&metric=edq_ratio")
    clock.now -= 5
    server.send("PATCH", "/runs/r1", wire.RunUpdate(name="other"), wire.Run)
    after = fetch(server, "/compare?run=r1&metric=edq_ratio")
    assert after.headers["etag"] != before.headers["etag"]
    assert '"other"' in after.text


def test_an_answer_holds_the_runs_in_the_order_asked_for(server):
    for run_id in ("r1", "r2"):
        server.filled(run_id, f"{run_id}-s")
    for order in (["r1", "r2"], ["r2", "r1"]):
        asked = "&".join(f"run={run_id}" for run_id in order)
        runs = fetch(server, f"/compare?metric=loss&{asked}").json()["runs"]
        assert [run["run_id"] for run in runs] == order


def test_an_answer_holds_the_metrics_in_the_order_asked_for(server):
    server.filled("r1", "s1")
    one, other = (
        f"/runs/r1/series?metric={a}&metric={b}" for a, b in (("edq_ratio", "loss"), ("loss", "edq_ratio"))
    )
    first, second = server.get(one, wire.Series), server.get(other, wire.Series)
    assert (first.metric, list(first.more)) == ("edq_ratio", ["loss"])
    assert (second.metric, list(second.more)) == ("loss", ["edq_ratio"])
    assert fetch(server, other, fetch(server, one).headers["etag"]).status_code == 200
    swapped = fetch(
        server,
        "/runs/r1/series?points=9&metric=loss",
        fetch(server, "/runs/r1/series?metric=loss&points=9").headers["etag"],
    )
    assert swapped.status_code == 304, "the order of other parameters does not matter"


@pytest.mark.slow
def test_so_do_layers_a_strategy_and_retention(server, clock):
    server.app.state.collage.store.sealing.limits = LIMITS
    server.filled("r1", "s1", steps=range(1, 81))
    path = "/runs/r1/heatmap?metric=edq_ratio&points=100"
    answers = [fetch(server, path)]
    server.stream("r1", stream_id="s2", rank=1, world_size=2, layers=[layer("head.weight")])
    answers.append(fetch(server, path))
    server.stream("r1", stream_id="s1", watch=watch("kahan"))
    answers.append(fetch(server, path))
    store = server.app.state.collage.store
    server.seal()
    answers.append(fetch(server, path))
    assert store.retention.expire("r1", {1: clock.now + 1e9})
    answers.append(fetch(server, path))
    etags = [answer.headers["etag"] for answer in answers]
    assert etags[2] == etags[3], "sealing changes nothing that readers see"
    assert len(set(etags)) == 4
    heatmaps = [wire.decode_message(answer.content, wire.Heatmap, wire.JSON) for answer in answers]
    assert [len(entry.layers) for entry in heatmaps] == [3, 4, 4, 4, 4]
    assert len(heatmaps[-1].steps) < len(heatmaps[-2].steps)


def test_and_coarse_points_that_retention_drops(server, clock):
    server.app.state.collage.store.sealing.limits = LIMITS
    server.filled("r1", "s1", steps=range(1, 81))
    store = server.app.state.collage.store
    server.seal()
    path, answers = "/runs/r1/series?metric=edq_ratio&points=1000", []
    for level in (1, 16):
        assert store.retention.expire("r1", {level: clock.now + 1e9})
        answers.append(fetch(server, path))
    assert fetch(server, path, answers[0].headers["etag"]).status_code == 200
    series = [wire.decode_message(answer.content, wire.Series, wire.JSON) for answer in answers]
    assert len(series[1].steps) < len(series[0].steps)


def test_a_deleted_run_is_gone_from_the_cache_too(server):
    server.filled("r1", "s1")
    etag = fetch(server, PATHS[0]).headers["etag"]
    server.send("DELETE", "/runs/r1", kind=wire.Deleted)
    assert fetch(server, PATHS[0], etag).status_code == 410
    assert fetch(server, "/compare?run=r1&metric=edq_ratio").status_code == 410


def test_the_newest_values_of_a_run_read_once_what_it_is_made_of(server):
    server.filled()
    with statements_on(server.app.state.collage.store.engine) as statements:
        assert len(server.get("/runs/r1/latest", wire.Latest).worst) == 3
    assert sum("FROM stream JOIN run" in statement for statement in statements) == 1


@pytest.mark.slow
def test_a_page_of_the_list_reads_its_runs_together(server):
    """Each run took a snapshot and thirty statements of its own."""
    app_state = server.app.state.collage
    for thread in (app_state.sealer, app_state.summariser):
        thread.stop(PATIENCE_SECONDS)
    store = app_state.store
    for place in range(12):
        server.filled(f"r{place}", f"s{place}")
    for place in range(12):
        server.send("PATCH", f"/runs/r{place}", wire.RunUpdate(state="finished"))
        server.seal(f"r{place}")

    def asked(limit):
        with statements_on(store.engine) as statements:
            runs = server.get(f"/runs?limit={limit}", wire.RunPage).runs
        assert len(runs) == limit
        assert all(run.latest["edq_ratio"] is not None for run in runs)
        return sum("FROM run_latest" in statement or "_chunk" in statement for statement in statements)

    few, many = asked(2), asked(12)
    assert many - few <= 12, "one statement a run, for its step"
    assert asked(12) == asked(2), "nothing a run once its newest step is known"


def test_chunks_of_one_run_or_of_many_are_the_same_statement(server):
    """A statement for each number of spans was kept by SQLAlchemy and by the database: megabytes each."""
    app_state = server.app.state.collage
    app_state.summariser.stop(PATIENCE_SECONDS)
    names = [f"r{place}" for place in range(5)]
    for name in names:
        server.filled(name, f"s-{name}")
        server.seal(name, journal_full=True)
    kinds = []
    for count in (1, 2, 5):
        with statements_on(app_state.store.engine) as statements:
            fetch(server, "/compare?metric=edq_ratio&" + "&".join(f"run={name}" for name in names[:count]))
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
