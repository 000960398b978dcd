"""docs/fleet.md: ten questions over all runs, with the API's numbers, in DuckDB and by night in other engines.

And `collage-monitor archive query`: the API's numbers, by SQL.
"""

import csv
import io
import json
import os
import sys

import numpy as np
import polars
import pytest
from click.testing import CliRunner
from collage_server.publishing import publish
from collage_server.settings import Settings
from deltalake import DeltaTable

from collage_monitor.command.query import open_fleet, query
from collage_monitor.errors import CollageError
from collage_monitor.statistics import finish_all, reduce_steps
from tests.server import fleet
from tests.server.conftest import NOW, Clock, running
from tests.server.questions import ANSWERS, DIALECTS, QUESTIONS, Numbers, same_rows
from tests.server.reads import layer_points, model_points
from tests.server.store.seen import ALL

pytestmark = pytest.mark.slow

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
    with running(Settings(folder=folder, no_auth=True), Clock(), store=store) as server:
        numbers = Numbers(server)
        return table, [answer(numbers) for answer in ANSWERS]


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
    needed = "pip install 'collage-monitor[engines]' and a Java runtime"
    spark_sql = pytest.importorskip("pyspark.sql", reason=needed)
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


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The fleet, archived and published."""
    folder = tmp_path_factory.mktemp("fleet")
    store = fleet.opened(folder)
    publish(store, "p")
    yield store
    store.close()


@pytest.fixture(scope="module")
def archive(store):
    return str(store.path.parent / "archive")


def asked(connection, view, run_id):
    found = connection.sql(f"select * from {view} where run = '{run_id}' order by all").arrow().read_all()
    return {name: found.column(name).to_pylist() for name in found.schema.names}


def same_metrics(found, totals, axis):
    """Every metric of SQL is that of the catalogue; those left out are no ratios of totals."""
    with np.errstate(all="ignore"):
        expected = finish_all(totals, intervals=False)
    shared = [key for key in expected if key in found]
    assert {"edq_ratio", "lost_update_ratio", "grad_norm", "param_norm", "nonfinite_grads"} <= set(shared)
    assert set(expected) - set(shared) <= {
        "edq", "edq_cosine", "update_error_ratio", "update_to_weight_ratio",
        "predicted_plain_lost_ratio", "half_ulp_margin", "half_ulp_lr_factor",
    }  # fmt: skip
    for key in shared:
        values = np.array(found[key], dtype=np.float64).reshape(np.shape(expected[key]))
        np.testing.assert_allclose(values, expected[key], rtol=1e-9, err_msg=f"{key} {axis}")


def test_metrics_are_those_of_the_catalogue(store, archive):
    with open_fleet(archive) as connection:
        for run in fleet.FLEET:
            model = model_points(store, run.run_id, None, ALL).totals
            layers = layer_points(store, run.run_id, run.keys, ALL).totals
            order = np.argsort(fleet.NAMES)
            for view, totals in (
                ("step_metrics", model),
                ("run_metrics", reduce_steps(model)),
                ("layer_metrics", {key: values[order] for key, values in reduce_steps(layers).items()}),
                ("layer_step_metrics", {key: values[:, order].T.ravel() for key, values in layers.items()}),
            ):
                same_metrics(asked(connection, view, run.run_id), totals, view)


def answered_by(archive, sql, *flags):
    return CliRunner().invoke(query, [sql, "--archive", archive, *flags], catch_exceptions=False).output


def test_rows_are_printed_as_a_table_as_csv_and_as_json(archive):
    sql = "select run, last_step, cast(null as int) as nothing, 1/3 as third from runs order by run limit 2"
    assert answered_by(archive, sql) == (
        "run           last_step  nothing     third\n"
        "light-3              80        –  0.333333\n"
        "light-4-wide         80        –  0.333333\n"
    )
    assert list(csv.reader(io.StringIO(answered_by(archive, sql, "--csv"))))[1] == ["light-3", "80", "", str(1 / 3)]
    row = json.loads(answered_by(archive, sql, "--json"))[0]
    assert row == {"run": "light-3", "last_step": 80, "nothing": None, "third": 1 / 3}


def test_what_is_not_there_is_said_with_what_to_do(archive, tmp_path):
    for folder, projects, words in (
        (str(tmp_path), (), "archive publish"),
        (archive, ("q",), "no published table of q"),
        (str(tmp_path / "none"), (), "cannot be read"),
    ):
        with pytest.raises(CollageError, match=words):
            open_fleet(folder, projects)
    with pytest.raises(CollageError, match="the query failed"):
        answered_by(archive, "select x")
