"""Parquet: the same table as CSV, typed, with null where nothing is known. Needs pyarrow, the extra `parquet`."""

from __future__ import annotations

import csv
import io
import math

import pytest

from tests.server.samples import LAYERS, report

parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")


def test_parquet_holds_what_csv_holds(server, monkeypatch):
    monkeypatch.setattr("collage_server.export.steps._POINTS", 2)
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
