"""Parquet: the same table as CSV, typed, with null where nothing is known. Needs pyarrow, the extra `parquet`."""

from __future__ import annotations

import csv
import io
import math
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from collage_server.store import Selection

from collage_monitor.statistics import finish, reduce_steps
from tests.server.reads import layer_points
from tests.server.samples import LAYERS, STATISTICS, report

parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
DOCS = (Path(__file__).parents[3] / "docs" / "how-to" / "export-and-import.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", DOCS, re.DOTALL)
READ = re.compile(r"read_parquet\('([^']+)'[^)]*\)")


@pytest.mark.slow
def test_parquet_holds_what_csv_holds(server, monkeypatch):
    monkeypatch.setattr("collage_server.export.step_batches._POINTS", 2)
    server.filled(steps=range(10, 60, 10))
    server.reports([report(90, 55, measured=False, scalars={"loss": float("nan")})])
    answer = server.client.get("/api/v1/runs/r1/export?format=parquet")
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    file = parquet.ParquetFile(io.BytesIO(answer.content))
    assert file.num_row_groups == 3
    table = file.read().to_pylist()
    rows = list(csv.DictReader(io.StringIO(server.client.get("/api/v1/runs/r1/export?format=csv").text)))
    assert len(table) == len(rows) == 5 * (1 + len(LAYERS)) + 1
    for typed, text in zip(table, rows, strict=True):
        assert list(typed) == list(text)
        assert (typed["layer"] or "") == text["layer"]
        for name in set(text) - {"layer"}:
            expected = None if text[name] == "" else float(text[name])
            same = typed[name] == expected or (expected is not None and math.isnan(expected))
            assert same, name
    assert math.isnan(table[-1]["loss"])


def test_single_ranks_have_a_column(server):
    server.filled(steps=(10, 20))
    answer = server.client.get("/api/v1/runs/r1/export?format=parquet&ranks=true")
    table = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    assert [row["rank"] for row in table] == [None] * 2 * (1 + len(LAYERS)) + [0, 0]
    assert [row["lost"] for row in table[-2:]] == [row["lost"] for row in table if row["layer"] is None][:2]


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


def test_the_documented_queries(server):
    """Against what the store itself reads; the folder and the file's name are columns that DuckDB adds."""
    server.filled(steps=range(1, 301))
    answer = server.client.get("/api/v1/runs/r1/export?format=parquet")
    table = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
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
