"""docs/fleet.md: ten questions over all runs, with the API's numbers, in DuckDB and by night in other engines.

And `collage-monitor archive query`: the API's numbers, by SQL.
"""

import csv
import io
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars
import pytest
from click.testing import CliRunner
from collage_server.publishing import publish
from collage_server.settings import Settings
from deltalake import DeltaTable

from collage_monitor import wire
from collage_monitor.command.query import open_fleet, query
from collage_monitor.errors import CollageError
from collage_monitor.statistics import finish_all, reduce_steps
from tests.server import fleet
from tests.server.conftest import NOW, Clock, running
from tests.server.reads import layer_points, model_points
from tests.server.store.seen import ALL

pytestmark = pytest.mark.slow

_TEXT = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
QUESTIONS = re.findall(r"^### \d+\. ([^\n]+)\n.*?```sql\n(.*?)```", _TEXT, re.DOTALL | re.MULTILINE)
"""(question, SQL)."""
_RUNS = {run.run_id: run for run in fleet.FLEET}
_EVERY = 10_000


def _dialects():
    """Engine → what of DuckDB's SQL it says otherwise, from the page's table."""
    lines = _TEXT.split("| DuckDB |", 1)[1].splitlines()
    engines = [cell.strip() for cell in lines[0].strip(" |").split("|")]
    rows = [re.findall(r"`([^`]+)`", line) for line in lines[2:] if line.startswith("|")]
    return {engine: [(row[0], row[place + 1]) for row in rows] for place, engine in enumerate(engines)}


DIALECTS = _dialects()


class Numbers:
    """What the server answers of the fleet."""

    def __init__(self, server):
        self._server = server
        query = "&".join(f"run={run.run_id}" for run in fleet.FLEET)
        compared = server.get(f"/compare?metric=edq_ratio&{query}", wire.Comparison)
        self.merged = {entry.run_id: entry.merged for entry in compared.runs}

    def series(self, run_id, metric, **query):
        """Step → value."""
        found = self._server.series(metric, run_id, points=_EVERY, **query)
        return dict(zip(found.steps, found.values, strict=True))

    def merged_over(self, run_id, metric, **query):
        """One number of all steps that are asked for."""
        [value] = self._server.series(metric, run_id, points=1, **query).values
        return value


def layers_that_lose_first(api):
    first: dict[tuple[int, str], int] = {}
    runs = defaultdict(set)
    for run in fleet.FLEET:
        for layer in fleet.NAMES:
            for step, lost in api.series(run.run_id, "lost_update_ratio", layer=layer).items():
                if lost > 0.5:
                    place = (3 * 16 * run.width, layer)
                    first[place] = min(step, first.get(place, step))
                    runs[place].add(run.run_id)
    rows = [(*place, step, len(runs[place])) for place, step in first.items()]
    return sorted(rows, key=lambda row: (row[0], row[2], row[1]))


def cost_by_rate(api):
    edqs = defaultdict(list)
    for run in fleet.FLEET:
        edqs[run.strategy, run.rate].append(api.merged[run.run_id]["edq_ratio"])
    return [(*place, len(held), min(held), np.mean(held)) for place, held in sorted(edqs.items())]


def stuck(api):
    key = "state_decrement_ratio/exp_avg_sq"
    return [(r, r, api.merged[r][key]) for r in sorted(_RUNS) if api.merged[r][key] < 0.1]


def worst_layers(api):
    rows = []
    for layer in fleet.NAMES:
        edqs = [api.merged_over(run.run_id, "edq_ratio", layer=layer) for run in fleet.FLEET]
        rows.append((layer, len(edqs), sum(edq < 0.9 for edq in edqs), min(edqs)))
    return sorted(rows, key=lambda row: (row[3], row[0]))


def lost_by_strategy(api):
    totals: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for run in fleet.FLEET:
        held = api.merged[run.run_id]
        totals[run.strategy, "bfloat16"] += [held["lost"], held["lost"] + held["distorted"] + held["faithful"]]
    return [(*place, lost / active) for place, (lost, active) in sorted(totals.items())]


def chance(api):
    edqs = defaultdict(list)
    for run in fleet.FLEET:
        edqs[run.strategy, 3 * 16 * run.width, run.rate].append(api.merged[run.run_id]["edq_ratio"])
    return [(*p, len(held), max(held) - min(held)) for p, held in sorted(edqs.items()) if len(held) > 1]


def first_losses(api):
    rows = []
    for run_id in sorted(_RUNS):
        steps = [step for step, lost in api.series(run_id, "lost_update_ratio").items() if lost > 0.3]
        rows += [(run_id, min(steps))] if steps else []
    return rows


def shares_of_loss(api):
    rows = []
    for run_id in sorted(_RUNS):
        missing = {}
        for layer in fleet.NAMES:
            norm = api.merged_over(run_id, "intended_norm", layer=layer)
            squares = norm**2 * _RUNS[run_id].steps
            missing[layer] = squares * (1 - api.merged_over(run_id, "edq_ratio", layer=layer))
        if sum(missing.values()) > 0:
            rows += [(run_id, layer, missing[layer] / sum(missing.values())) for layer in sorted(fleet.NAMES)]
    return rows


def blow_ups(api):
    rows = []
    for run_id in sorted(_RUNS):
        for layer in fleet.NAMES:
            counts = {k: n for k, n in api.series(run_id, "nonfinite_grads", layer=layer).items() if n}
            rows += [(run_id, layer, min(counts), sum(counts.values()))] if counts else []
    return rows


def resumes(api):
    rows = []
    for run in fleet.FLEET:
        if run.resumed is None:
            continue
        for attempt, first, last in ((1, 1, run.resumed - 1), (2, run.resumed, run.steps)):
            edq = api.merged_over(run.run_id, "edq_ratio", **{"from": first, "to": last})
            rows.append((run.run_id, attempt, first, last, edq))
    return rows


ANSWERS = (
    layers_that_lose_first,
    cost_by_rate,
    stuck,
    worst_layers,
    lost_by_strategy,
    chance,
    first_losses,
    shares_of_loss,
    blow_ups,
    resumes,
)
"""In the order of the page: what the API says, as rows."""


def same_rows(found, expected, what):
    """Rows are equal, numbers to 1e-9."""
    assert expected, what
    assert len(found) == len(expected), (what, found, expected)
    for row, wanted in zip(found, expected, strict=True):
        assert len(row) == len(wanted)
        for value, number in zip(row, wanted, strict=True):
            if isinstance(number, str):
                assert value == number, (what, row, wanted)
            else:
                assert abs(float(value) - number) <= 1e-9 * max(abs(number), 1e-3), (what, row, wanted)


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
        columns = "* except (layer, name), name as layer"
        session.query(f"create view layers as select {columns} from deltaLakeLocal('{table}')")
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
