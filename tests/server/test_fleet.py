"""docs/fleet.md: ten questions over all runs, with the API's numbers, in DuckDB and by night in other engines."""

import json
import os
import sys

import pytest
from collage_server.app import create_app
from collage_server.publishing import publish
from collage_server.settings import Settings
from deltalake import DeltaTable
from fastapi.testclient import TestClient

from collage_monitor.command.query import open_fleet
from tests.server import fleet
from tests.server.conftest import NOW, Clock, Server
from tests.server.questions import ANSWERS, DIALECTS, QUESTIONS, Numbers, same_rows

TITLES = [title for title, _ in QUESTIONS]


def change(store):
    """A run more that is deleted again, and a rank that comes late to a run in the table; each is published."""
    more = [fleet.FleetRun("more", "plain", 1e-3)]
    fleet.fill(store, more)
    fleet.archive_all(store, more)
    assert publish(store, "p").runs == len(fleet.FLEET) + 1
    store.runs.delete("more", NOW)
    assert publish(store, "p").runs == len(fleet.FLEET)
    fleet.launch(store, fleet.FLEET[6], 1, 1, rank=1)
    fleet.archive_all(store)


@pytest.fixture(
    scope="module",
    params=[pytest.param("as made", marks=pytest.mark.nightly), "right after a deletion and a late rank"],
)
def answered(request, tmp_path_factory):
    """(the published table, the API's answers)."""
    folder = tmp_path_factory.mktemp("fleet")
    store = fleet.opened(folder)
    table = publish(store, "p").table
    if request.param != "as made":
        before = set(DeltaTable(table).file_uris())
        change(store)
        publish(store, "p")
        assert before - set(DeltaTable(table).file_uris()), "the late rank's run was written anew"
    clock = Clock()
    app = create_app(Settings(folder=folder, no_auth=True), clock=clock, store=store)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        numbers = Numbers(Server(client, clock, app))
        answers = [answer(numbers) for answer in ANSWERS]
    return table, answers


def in_dialect(sql, engine):
    for ours, theirs in DIALECTS[engine]:
        sql = sql.replace(ours, theirs)
    return sql


@pytest.mark.parametrize("number", range(10), ids=TITLES)
def test_duckdb_gives_the_api_s_numbers(answered, number):
    table, answers = answered
    title, sql = QUESTIONS[number]
    with open_fleet(table.rpartition("/")[0]) as connection:
        same_rows(connection.sql(sql).fetchall(), answers[number], title)


@pytest.mark.nightly
def test_spark_gives_them_on_two_workers(answered):
    spark_sql = pytest.importorskip(
        "pyspark.sql", reason="pip install 'collage-monitor[engines]' and a Java runtime"
    )
    table, answers = answered
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = spark_sql.SparkSession.builder.master("local-cluster[2,1,1024]").appName("fleet")
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.ansi.doubleQuotedIdentifiers": "true",
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        files = DeltaTable(table).file_uris()
        layers = spark.read.option("basePath", table).option("mergeSchema", "true").parquet(*files)
        layers.drop("layer").withColumnRenamed("name", "layer").createOrReplaceTempView("layers")
        spark.read.parquet(f"{table}/runs.parquet").createOrReplaceTempView("runs")
        for (title, sql), expected in zip(QUESTIONS, answers, strict=True):
            rows = spark.sql(in_dialect(sql, "Spark")).collect()
            same_rows([tuple(row) for row in rows], expected, title)
        assert spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() == 3, "the driver and two workers"
    finally:
        spark.stop()


def test_polars_gives_them(answered):
    import polars

    table, answers = answered
    layers = polars.scan_delta(table).drop("layer").rename({"name": "layer"})
    rate = polars.col("config").str.json_path_match("$.learning_rate").alias("learning_rate")
    runs = polars.scan_parquet(f"{table}/runs.parquet").with_columns(rate)
    context = polars.SQLContext(layers=layers, runs=runs)
    for (title, sql), expected in zip(QUESTIONS, answers, strict=True):
        same_rows(context.execute(in_dialect(sql, "Polars"), eager=True).rows(), expected, title)


@pytest.mark.nightly
def test_clickhouse_gives_them(answered, tmp_path, monkeypatch):
    session_of = pytest.importorskip("chdb.session", reason="pip install 'collage-monitor[engines]'")
    table, answers = answered
    # It reads files of the working folder alone.
    monkeypatch.chdir(table)
    with session_of.Session(str(tmp_path / "chdb")) as session:
        session.query(
            f"create view layers as select * except (layer, name), name as layer from deltaLakeLocal('{table}')"
        )
        session.query(f"create view runs as select * from file('{table}/runs.parquet', Parquet)")
        for (title, sql), expected in zip(QUESTIONS, answers, strict=True):
            found = json.loads(session.query(in_dialect(sql, "ClickHouse"), "JSONCompact").bytes())
            same_rows([tuple(row) for row in found["data"]], expected, title)
