"""The server's benchmarks send what it accepts, copy what was sealed, and have gates that can be missed."""

import sqlite3
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
from collage_server.store import ReportGroup, Selection
from collage_server.store.server_tables import metadata

from benchmarks._harness import Figure
from benchmarks._population import LARGE, SMALL, UnsyncedStore, batches, numbers_in, populate, requests
from benchmarks._serving import NullStore
from benchmarks.archive import Question, ask, filled, in_turns, opened, reports
from benchmarks.load import Load, run_load, stored
from benchmarks.query import StoredColumns, StoredRows, questions, read_by_key
from benchmarks.runs import fill
from benchmarks.runs import questions as questions_about_runs
from collage_monitor import wire
from tests.server.reads import layer_points, model_points
from tests.server.samples import layer, stream_create

pytestmark = pytest.mark.slow


def declared(shape):
    layers = [layer(f"layer.{i}") for i in range(shape.layers)]
    return stream_create(layers=layers, statistics=list(shape.statistics))


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=lambda shape: shape.name)
def test_its_reports_are_accepted(server, shape):
    server.run()
    server.attempt()
    server.post("/runs/r1/streams", declared(shape))
    for request in requests("s0", shape, 0, 20, 10):
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /api/v1/streams/s0/reports HTTP/1.1\r\n")
        assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
        answer = server.post("/streams/s0/reports", body, wire.BatchAnswer)
        assert (answer.accepted, answer.rejected) == (10, [])
    assert len(server.series("lost").steps) == 20


def test_the_null_store_acknowledges_without_writing(tmp_path):
    store = NullStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    store.runs.create("p", wire.RunCreate(run_id="r1"), 0.0)
    store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=0), 0.0)
    store.streams.create_stream("r1", declared(SMALL), 0.0)
    [batch] = batches(SMALL, 0, 5, 5, seed=0)
    [outcome] = store.journal.append([ReportGroup(store.streams.stream_record("s0"), batch.reports)], 0.0)
    assert outcome.accepted == 5
    assert len(model_points(store, "r1", None, Selection()).steps) == 0
    store.close()


@pytest.mark.parametrize(
    ("bounds", "missed"),
    [({}, False), ({"limit": 2.0}, False), ({"limit": 1.9}, True), ({"floor": 2.0}, False), ({"floor": 2.1}, True)],
)
def test_a_gate_judges_the_median(bounds, missed):
    assert Figure("f", "×", (1.0, 2.0, 9.0), **bounds).missed == missed


def test_a_copied_run_of_the_query_benchmark_is_as_if_it_had_been_sealed(tmp_path):
    families = (("layers", 2, 300, 200), ("model", 1, 256, 0))
    assert numbers_in(families) == 20 * (600 * 201 + 256)
    store = UnsyncedStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    populate(store, families, 0)
    runs = ("layers-0", "layers-1")
    sealed, copied = (layer_points(store, run, ("lost",), Selection(), ["layer.100"]) for run in runs)
    assert len(sealed.steps) == 300
    assert sealed.totals["lost"].tolist() == copied.totals["lost"].tolist()
    assert store.streams.of_run("layers-1")[0].stream_id == "layers-1-0"
    store.close()
    with closing(sqlite3.connect(tmp_path / "collage.sqlite")) as connection:
        # Of each run 256 points are sealed, a whole chunk.
        layer = StoredColumns("layer_chunk", ["layers-0", "layers-1"], 1, ["lost", "elements"], layer=100)
        assert read_by_key(connection.cursor(), [layer], "?") == 2 * 2 * 256
        for blocks, numbers in (
            (StoredColumns("layer_chunk", ["layers-1"], 1, ["lost"]), 256 * 200),
            (StoredColumns("model_chunk", ["model"], 1), 20 * 256),
            (StoredColumns("point_chunk", ["model"], 1), 5 * 256),
            (StoredColumns("scalar_chunk", ["model"]), 3 * 256),
        ):
            assert read_by_key(connection.cursor(), [blocks], "?") == numbers


def test_the_documented_limits_are_those_that_are_held():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "curves.md").read_text(encoding="utf-8")
    header = "| Question | SQLite, ms | at most |"
    rows = page.partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    stated = [tuple(cell.strip() for cell in row.split("|")[3:8:4]) for row in rows]
    held = [question.limits for question in questions() if question.limits is not None]
    assert stated == [tuple(f"{warm:g} and {cold:g}" for warm, cold in limits) for limits in held]


def test_many_runs_are_told_apart_and_answered_alike(server):
    store = server.app.state.collage.store
    fill(store, 0, runs=6)
    names = [f"run-{place}" for place in range(6)]
    listed = server.get("/runs", wire.RunPage).runs
    assert sorted(run.run_id for run in listed) == names
    assert {run.name for run in listed} == set(names)
    assert all(run.latest == listed[0].latest for run in listed)
    assert listed[0].latest["edq_ratio"] is not None
    assert [row.overview.measured_steps for row in server.get("/run-table", wire.RunTable).rows] == [32] * 6
    paths = [path for question in questions_about_runs() for path in question.paths]
    assert all("{points}" in path for path in paths)
    with closing(sqlite3.connect(store.path)) as connection:
        rows = StoredRows(("run", "run_summary"), ["run-1", "run-2"], counted=True)
        known = len(metadata.tables["run"].c) + len(metadata.tables["run_summary"].c)
        assert read_by_key(connection, [rows], "?") == 2 * known


def test_an_answer_that_differs_fails_the_benchmark_of_archives(tmp_path):
    question = Question("all layers", Selection(by_layer=True), 1.0)
    with ExitStack() as stack:
        stores = [opened(stack, tmp_path / str(number)) for number in range(3)]
        for store, seed in zip(stores, (0, 0, 1), strict=True):
            filled(store, "run", 2, reports(2, 70, seed))
        first, same, other = (partial(ask, store, question) for store in stores)
        taken = in_turns({"a": first, "b": same}, 2)
        assert {kind: len(times) for kind, times in taken.items()} == {"a": 2, "b": 2}
        with pytest.raises(RuntimeError, match="has another answer"):
            in_turns({"a": first, "b": other}, 2)


def test_of_a_load_what_is_shed_is_refused_what_is_acknowledged_kept_what_is_missing_found(tmp_path):
    outcome = run_load(Load(seconds=1.0, agents=16, rate=300.0), tmp_path, in_flight_bytes=2**20)
    statuses = outcome.tally.statuses
    assert set(statuses) == {200, 503}
    assert outcome.tally.without_retry_after == 0
    assert sum(outcome.tally.acknowledged.values()) > 0
    assert (outcome.missing, outcome.unexpected) == (0, 0)
    path = tmp_path / "collage.sqlite"
    before, _ = stored(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM report WHERE stream_id = 'run-0-1' AND seq = 3")
    after, _ = stored(path)
    assert before["run-0-1"] - after["run-0-1"] == {3}
    assert before["run-0-0"] == after["run-0-0"]
