"""`collage-monitor archive query`: the API's numbers, by SQL."""

import csv
import io
import json

import numpy as np
import pytest
from click.testing import CliRunner
from collage_server.publishing import publish

from collage_monitor.command.query import open_fleet, query
from collage_monitor.errors import CollageError
from collage_monitor.statistics import finish_all, reduce_steps
from tests.server import fleet
from tests.server.reads import layer_points, model_points
from tests.server.store.seen import ALL


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


def same(found, totals, axis):
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
            same(asked(connection, "step_metrics", run.run_id), model, "steps")
            same(asked(connection, "run_metrics", run.run_id), reduce_steps(model), "run")
            order = np.argsort(fleet.NAMES)
            merged = {key: values[order] for key, values in reduce_steps(layers).items()}
            same(asked(connection, "layer_metrics", run.run_id), merged, "layers")
            turned = {key: values[:, order].T.ravel() for key, values in layers.items()}
            same(asked(connection, "layer_step_metrics", run.run_id), turned, "layers and steps")


def test_layers_have_names_and_runs_can_be_joined(archive):
    sql = (
        "select strategy, layer, count(*) as steps, sum(lost) as lost from layers join runs using (project, run) "
        "group by all order by all"
    )
    result = CliRunner().invoke(query, [sql, "--archive", archive, "--json"], catch_exceptions=False)
    rows = json.loads(result.output)
    assert [row["layer"] for row in rows[:3]] == sorted(fleet.NAMES)
    assert sum(row["steps"] for row in rows) == 3 * sum(run.steps for run in fleet.FLEET)


def test_rows_are_printed_as_a_table_and_as_csv(archive):
    sql = "select run, last_step, cast(null as int) as nothing, 1/3 as third from runs order by run limit 2"
    printed = CliRunner().invoke(query, [sql, "--archive", archive], catch_exceptions=False).output
    assert printed == (
        "run           last_step  nothing     third\n"
        "light-3              80        –  0.333333\n"
        "light-4-wide         80        –  0.333333\n"
    )
    text = CliRunner().invoke(query, [sql, "--archive", archive, "--csv"], catch_exceptions=False).output
    assert list(csv.reader(io.StringIO(text)))[1] == ["light-3", "80", "", str(1 / 3)]


def test_what_is_not_there_is_said_with_what_to_do(archive, tmp_path):
    for folder, projects, words in (
        (str(tmp_path), (), "archive publish"),
        (archive, ("q",), "no published table of q"),
        (str(tmp_path / "none"), (), "cannot be read"),
    ):
        with pytest.raises(CollageError, match=words):
            open_fleet(folder, projects)
    with pytest.raises(CollageError, match="the query failed"):
        CliRunner().invoke(query, ["select x", "--archive", archive], catch_exceptions=False)
