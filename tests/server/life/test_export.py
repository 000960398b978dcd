"""Export: every number that was stored, ranks merged, in each format; streamed a batch of steps at a time."""

import csv
import io
import json
import math
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from collage_server.export import step_batches as export_steps
from collage_server.export.file_formats import csv_bytes, jsonl_bytes
from collage_server.store import Selection

from collage_monitor import wire
from collage_monitor.statistics import finish, reduce_steps
from tests.server.reads import layer_points, model_points
from tests.server.samples import LAYERS, STATISTICS, block, layer, model_of, report
from tests.waiting import until

DOCS = (Path(__file__).parents[3] / "docs" / "how-to" / "export-and-import.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", DOCS, re.DOTALL)
READ = re.compile(r"read_parquet\('([^']+)'[^)]*\)")


def exported(server, query=""):
    answer = server.client.get(f"/api/v1/runs/r1/export{query}")
    assert answer.status_code == 200, answer.text
    return answer


def lines_of(server, query=""):
    return [json.loads(line) for line in exported(server, query).text.splitlines()]


def table_of(server, query="?format=csv"):
    return list(csv.DictReader(io.StringIO(exported(server, query).text)))


def parquet_of(server, query=""):
    """The file, typed: it needs pyarrow, the extra `parquet`."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    answer = exported(server, f"?format=parquet{query}")
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    return parquet.ParquetFile(io.BytesIO(answer.content))


@pytest.fixture
def filled(server):
    server.filled(config={"width": 128})
    odd = report(90, 55, measured=False, scalars={"loss": float("nan"), "edq_ratio": float("inf")})
    server.reports([odd])
    return server


@pytest.mark.slow
@pytest.mark.parametrize("batch_numbers", [2**22, 100])
def test_json_lines_hold_what_was_sent(filled, monkeypatch, batch_numbers):
    monkeypatch.setattr(export_steps, "_NUMBERS", batch_numbers)
    answer, lines = exported(filled), lines_of(filled)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["collage-lines"] == str(len(lines))
    assert answer.headers["content-disposition"] == 'attachment; filename="r1.jsonl"'
    assert lines[0]["run"]["config"] == {"width": 128}
    assert (lines[0]["statistics"], lines[0]["steps"]) == (STATISTICS, 6)
    assert [line["layer"]["name"] for line in lines if line["kind"] == "layer"] == LAYERS
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [10, 20, 30, 40, 50, 55]
    for line in steps[:5]:
        values = block(line["step"])
        assert line["time"] == 1_700_000_000.0 + line["step"]
        assert (line["first_step"], line["ranks"]) == (line["step"], 1)
        assert line["scalars"] == {"loss": 4.0 - 0.01 * line["step"], "tokens": 100.0 * line["step"]}
        assert line["model"] == dict(zip(STATISTICS, model_of(values).tolist(), strict=True))
        assert line["layers"] == dict(zip(STATISTICS, values.tolist(), strict=True))
    logged = {"loss": "NaN", "edq_ratio": "Infinity"}
    assert steps[5] == {"kind": "step", "step": 55, "time": 1_700_000_055.0, "scalars": logged}
    events = [line["event"] for line in lines if line["kind"] == "event"]
    assert [(event["kind"], event["step"]) for event in events] == [("attempt", 1)]
    assert lines[-1] == {"kind": "end", "steps": 6}
    lines = lines_of(filled, "?layers=false")
    assert {line["kind"] for line in lines} == {"run", "step", "event", "end"}
    assert all("layers" not in line for line in lines)


@pytest.mark.slow
def test_sealed_and_unsealed_steps_stand_in_one_export(server, clock):
    server.filled(steps=range(1, 301))
    before = lines_of(server)
    store = server.app.state.collage.store
    server.client.patch("/api/v1/runs/r1", json={"state": "finished"})
    server.seal()
    assert not store.journal.runs()
    after = lines_of(server)
    assert after[1:] == before[1:]
    assert len(after) == 1 + len(LAYERS) + 300 + 1 + 1


@pytest.mark.slow
def test_csv_has_a_row_a_step_and_layer_with_finished_metrics(filled):
    """And tells absent from not a number, and a logged name from a metric."""
    rows = table_of(filled)
    assert len(rows) == 5 * (1 + len(LAYERS)) + 1
    assert exported(filled, "?format=csv").headers["collage-lines"] == str(len(rows) + 1)
    assert [row["layer"] for row in rows[:5]] == ["", *LAYERS, ""]
    assert [int(row["step"]) for row in rows[:5]] == [10, 10, 10, 10, 20]
    series = filled.series("edq_ratio")
    model = [float(row["edq_ratio"]) for row in rows if not row["layer"] and row["edq_ratio"]]
    assert model == series.values
    assert [float(row["edq_ratio_low"]) for row in rows if not row["layer"] and row["edq_ratio_low"]] == series.low
    heatmap = filled.get("/runs/r1/heatmap?metric=edq_ratio", wire.Heatmap)
    for name, values in zip(heatmap.layers, heatmap.values, strict=True):
        assert [float(row["edq_ratio"]) for row in rows if row["layer"] == name] == values
    assert float(rows[1]["lost"]) == block(10)[STATISTICS.index("lost"), 0]
    assert (rows[-1]["step"], rows[-1]["loss"], rows[-1]["logged/edq_ratio"]) == ("55", "NaN", "Infinity")
    assert (rows[-1]["edq_ratio"], rows[-1]["tokens"], rows[-1]["ranks"]) == ("", "", "0")
    assert {row["loss"] for row in rows if row["layer"]} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
def test_single_ranks_where_they_are_asked_for(server, clock, monkeypatch, sealed):
    monkeypatch.setattr(export_steps, "_POINTS", 2)
    server.run()
    server.attempt()
    for rank, steps in ((0, (10, 20, 30)), (3, (10, 30))):
        server.stream(stream_id=f"s{rank}", rank=rank, world_size=4)
        server.reports([report(i, step, rank=rank) for i, step in enumerate(steps)], f"s{rank}")
    if sealed:
        server.client.patch("/api/v1/runs/r1", json={"state": "finished"})
        server.seal()
    expected = {(step, rank): model_of(block(step, rank)).tolist() for step in (10, 20, 30) for rank in (0, 3)}
    del expected[20, 3]
    lines = lines_of(server, "?ranks=true")
    told = [line.get("rank", line["kind"]) for line in lines[1 + len(LAYERS) : -2]]
    assert told == ["step", "step", 0, 0, 3, "step", 0, 3]
    found = {(line["step"], line["rank"]): line["model"] for line in lines if line["kind"] == "rank"}
    assert found == {place: dict(zip(STATISTICS, values, strict=True)) for place, values in expected.items()}
    table = parquet_of(server, "&ranks=true").read().to_pylist()
    rows = table_of(server, "?format=csv&ranks=true")
    assert [str(row["rank"]) for row in table] == [row["rank"] or "None" for row in rows]
    assert [row["lost"] for row in table] == [float(row["lost"]) for row in rows]
    for row in rows:
        if row["rank"]:
            values = expected.pop((int(row["step"]), int(row["rank"])))
            assert (row["layer"], row["ranks"], row["loss"]) == ("", "1", "")
            assert [float(row[name]) for name in STATISTICS] == values
            assert float(row["edq_ratio"]) > 0
    assert not expected
    assert [row for row in table_of(server) if "rank" in row] == []
    assert len(rows) == len(table_of(server)) + 5


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_between_batches_no_transaction_is_open_and_reports_arrive(server, monkeypatch, form):
    """A long export, or a slow reader of one, keeps neither the log of SQLite nor dead rows of PostgreSQL alive."""
    monkeypatch.setattr(export_steps, "_POINTS", 2)
    server.filled(steps=range(10, 60, 10))
    store = server.app.state.collage.store
    plan = export_steps.plan_export(store, "r1", layers=True, ranks=True)
    run = server.get("/runs/r1", wire.Run)
    parts = jsonl_bytes(store, plan, run) if form == "jsonl" else csv_bytes(store, plan)
    for number, _ in enumerate(parts):
        # Work in the background may hold a connection for a moment; one that the export kept would never come back.
        until(lambda: store.engine.pool.checkedout() == 0, "the export gave its connection back")
        assert server.reports([report(100 + number, 100 + number)]).accepted == 1
    assert number > 3


def test_an_empty_run_and_unknown_ones(server):
    server.run()
    assert [line["kind"] for line in lines_of(server)] == ["run", "end"]
    assert len(table_of(server)) == 0
    assert server.get("/runs/none/export", status=404).code == "not_found"
    assert server.get("/runs/r1/export?format=xml", status=422).field == "format"
    server.send("DELETE", "/runs/r1")
    assert server.get("/runs/r1/export", status=410).code == "gone"


def test_a_batch_is_bounded_by_measured_points_and_by_steps(server):
    server.filled(steps=range(1, 40))
    store = server.app.state.collage.store
    plan = export_steps.plan_export(store, "r1", layers=True)
    narrow = export_steps.ExportPlan(**{**vars(plan), "batch_points": 7})
    read = list(export_steps.read_batches(store, narrow))
    assert [len(batch.points.steps) for batch in read] == [7, 7, 7, 7, 7, 4]
    assert np.concatenate([batch.steps for batch in read]).tolist() == list(range(1, 40))
    whole = model_points(store, "r1", ("lost",), Selection()).totals["lost"]
    assert np.concatenate([batch.points.totals["lost"] for batch in read]).tolist() == whole.tolist()


def test_parquet_without_its_library_says_what_to_install(filled, monkeypatch):
    monkeypatch.setattr("collage_server.export.file_formats.find_spec", lambda _: None)
    error = filled.get("/runs/r1/export?format=parquet", status=422)
    assert error.field == "format"
    assert "collage-monitor[parquet]" in error.message


def test_names_that_csv_must_quote_come_back(server):
    names = ["a,b", 'say "x"', "plain"]
    server.run()
    server.attempt()
    server.stream(layers=[layer(name) for name in names])
    server.reports([report(0, 10)])
    assert [row["layer"] for row in table_of(server)] == ["", *names]


@pytest.mark.slow
def test_a_run_of_few_layers_is_read_in_few_batches(server):
    """Each batch costs a dozen statements, however few points it has."""
    server.filled(steps=range(1, 601))
    plan = export_steps.plan_export(server.app.state.collage.store, "r1", layers=True)
    assert [len(batch.steps) for batch in export_steps.read_batches(server.app.state.collage.store, plan)] == [600]


@pytest.mark.slow
def test_parquet_holds_what_csv_holds(server, monkeypatch):
    monkeypatch.setattr(export_steps, "_POINTS", 2)
    server.filled(steps=range(10, 60, 10))
    server.reports([report(90, 55, measured=False, scalars={"loss": float("nan")})])
    file = parquet_of(server)
    assert file.num_row_groups == 3
    table = file.read().to_pylist()
    rows = table_of(server)
    assert len(table) == len(rows) == 5 * (1 + len(LAYERS)) + 1
    for typed, text in zip(table, rows, strict=True):
        assert list(typed) == list(text)
        assert (typed["layer"] or "") == text["layer"]
        for name in set(text) - {"layer"}:
            expected = None if text[name] == "" else float(text[name])
            same = typed[name] == expected or (expected is not None and math.isnan(expected))
            assert same, name
    assert math.isnan(table[-1]["loss"])


def answered(query, rows):
    """What a documented query says of these rows: it is plain SQL but for the function that reads the files."""
    (file,) = READ.findall(query)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = sqlite3.Row
        names = ", ".join(f'"{name}"' for name in rows[0])
        marks = ", ".join("?" * len(rows[0]))
        connection.execute(f'CREATE TABLE "{file}" ({names})')
        connection.executemany(f'INSERT INTO "{file}" VALUES ({marks})', [tuple(row.values()) for row in rows])
        return [dict(row) for row in connection.execute(READ.sub(r'"\1"', query))]


@pytest.mark.slow
def test_the_documented_queries(server):
    """Against what the store itself reads; the folder and the file's name are columns that DuckDB adds."""
    server.filled(steps=range(1, 301))
    table = parquet_of(server).read().to_pylist()
    place = {"strategy": "plus", "filename": "strategy=plus/r1.parquet"}
    ended, worst = (answered(query, [row | place for row in table]) for query in QUERIES)

    points = layer_points(server.app.state.collage.store, "r1", STATISTICS, Selection(first_step=45))
    assert len(points.steps) == 256
    merged = {key: finish(key, reduce_steps(points.totals, axis=0)) for key in ("edq_ratio", "lost_update_ratio")}
    order = np.argsort(merged["edq_ratio"])
    assert [row["layer"] for row in worst] == [LAYERS[index] for index in order]
    for key, values in merged.items():
        assert [row[key] for row in worst] == pytest.approx(values[order].tolist()), key
    lowest = finish("edq_ratio", points.totals).min(axis=0)
    assert [row["edq_ratio_minimum"] for row in worst] == pytest.approx(lowest[order].tolist())
    assert {row["step"] for row in worst} == {300}

    last = range(271, 301)
    model = dict(zip(server.series("edq_ratio").steps, server.series("edq_ratio").values, strict=True))
    assert [(row["strategy"], row["filename"], row["points"]) for row in ended] == [(*place.values(), len(last))]
    assert ended[0]["loss"] == pytest.approx(np.mean([4.0 - 0.01 * step for step in last]))
    assert ended[0]["edq_ratio"] == pytest.approx(np.mean([model[step] for step in last]))
