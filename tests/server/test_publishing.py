"""A project's Delta table: every visible measured step in one row a layer, in step with what the database holds."""

import os
import shutil
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from collage_server import publishing
from collage_server.command.archive import archive
from collage_server.publishing import publish
from collage_server.store import ReportGroup
from collage_server.store.archive.paths import project_folder
from collage_server.store.sealing import archiving
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from collage_monitor import wire
from tests.forking import SERVER, fork
from tests.server import fleet
from tests.server.reads import layer_points
from tests.server.samples import report, stream_create, watch
from tests.server.store.contract import NOW
from tests.server.store.seen import ALL

pytestmark = pytest.mark.slow

PUBLISHER = (*SERVER, "collage_server.publishing")
PUBLISHES = """
import sys, time
from pathlib import Path
from collage_server.publishing import publish
from collage_server.store import SqliteStore, archive_files

folder, start = map(Path, sys.argv[1:])
files = archive_files(str(folder / "archive"), folder / "cache", 2**30)
store = SqliteStore(folder / "collage.sqlite", stale_after_seconds=600.0, archive=files)
store.open()
while not start.exists():
    time.sleep(0.001)
for _ in range(3):
    publish(store, "p")
"""


@pytest.fixture
def store(tmp_path):
    """The fleet, archived."""
    store = fleet.opened(tmp_path)
    yield store
    store.close()


@pytest.fixture
def files(store):
    return store.archiving.files


def add(store, run, project="p"):
    fleet.fill(store, [run], project)
    fleet.archive_all(store, [run])


def delete(store, run_id="plain-wide"):
    store.runs.delete(run_id, NOW)
    while store.retention.purge(100):
        pass


def asked(table, sql):
    """What an engine without a filter answers about the table `held`."""
    with duckdb.connect() as connection:
        connection.register("held", DeltaTable(table).to_pyarrow_dataset())
        return connection.sql(sql).arrow().read_all()


def rows(table):
    """By run: the steps, and {statistic: [step, layer]}."""
    found = asked(table, "select * from held order by run, step, layer")
    runs, first = np.unique(found.column("run").to_numpy(), return_index=True)
    held = {}
    for run, own in zip(runs, np.split(np.arange(found.num_rows), first[1:]), strict=True):
        part = found.slice(own[0], len(own))
        steps = part.column("step").to_numpy().reshape(-1, 3)
        assert (steps == steps[:, :1]).all()
        known = (key for key in part.schema.names if key in fleet.KEYS)
        held[run] = steps[:, 0], {key: part.column(key).to_numpy().reshape(-1, 3) for key in known}
    return held


def check(store, table, runs=fleet.FLEET):
    """The table's rows are the API's points, bit for bit, each once."""
    held = rows(table)
    for run in runs:
        steps, values = held[run.run_id]
        points = layer_points(store, run.run_id, fleet.KEYS, ALL)
        assert steps.tolist() == points.steps.tolist() == list(range(1, run.steps + 1))
        assert set(values) == set(fleet.KEYS)
        for key in fleet.KEYS:
            np.testing.assert_array_equal(values[key], points.totals[key])


def files_of(table):
    return sorted(DeltaTable(table).file_uris())


def listed(table):
    """The table of runs, by their ids."""
    return {row["run"]: row for row in pq.read_table(f"{table}/runs.parquet").to_pylist()}


def test_every_visible_step_stands_in_one_row_a_layer_whoever_reads(store, files):
    """Of the run that was resumed, too: what its second launch hides of a file is not in the copy of it."""
    done = publish(store, "p")
    assert (done.runs, done.added, done.removed) == (len(fleet.FLEET), done.files, 0)
    check(store, done.table)
    named = files_of(done.table)
    assert len([path for path in named if "visible-" in path]) == 1, "files that nobody hides are named as they are"
    whole = Path(files.folder, "p")
    assert len(list(whole.rglob("*.parquet"))) - len(list(files.stored())) == 2, "the copy, and the runs"
    held = listed(done.table)
    assert sorted(held) == sorted(run.run_id for run in fleet.FLEET)
    row = held["light-4-wide"]
    assert (row["strategy"], row["dtype"], row["elements"], row["layers"]) == ("light", "bfloat16", 3 * 64 * 16, 3)
    assert (row["config"], row["findings"]) == ('{"learning_rate": 0.0001, "seed": 0}', "{}")
    assert (row["state"], row["last_step"], row["created_at"].timestamp()) == ("finished", 80, NOW)


def test_a_second_call_changes_nothing_and_one_after_the_log_was_deleted_makes_it_anew(store, files, monkeypatch):
    """Sweeping leaves what no row of the database names: the log, its checkpoints, the runs, copies."""
    first = publish(store, "p")
    named, version = files_of(first.table), DeltaTable(first.table).version()
    again = publish(store, "p")
    assert (again.added, again.removed, again.files) == (0, 0, first.files)
    assert DeltaTable(first.table).version() == version
    DeltaTable(first.table).create_checkpoint()
    monkeypatch.setattr(archiving, "_GRACE_SECONDS", -3600.0)
    before = sorted(files.folder.rglob("*"))
    assert store.archiving.sweep(time.time()) == 0
    assert sorted(files.folder.rglob("*")) == before
    check(store, first.table)
    shutil.rmtree(Path(first.table, "_delta_log"))
    assert publish(store, "p").added == first.files
    assert files_of(first.table) == named
    check(store, first.table)


def test_runs_come_and_go_with_their_files_alone(store, files):
    first = publish(store, "p")
    more = fleet.FleetRun("late", "plus", 1e-3, more=("state_zero/exp_avg",), steps=40)
    fleet.fill(store, [more])
    assert publish(store, "p").runs == first.runs, "nothing of it is archived yet"
    fleet.archive_all(store, [more])
    done = publish(store, "p")
    assert (done.runs, done.removed, done.files) == (first.runs + 1, 0, first.files + done.added)
    assert "state_zero/exp_avg" in DeltaTable(first.table).schema().to_json()
    check(store, first.table)
    store.runs.update("plus-3-a", wire.RunUpdate(state="running"), NOW + 200)
    gone = publish(store, "p")
    assert (gone.runs, gone.added) == (first.runs, 0)
    assert gone.removed > 0
    store.runs.update("plus-3-a", wire.RunUpdate(state="finished"), NOW + 300)
    assert publish(store, "p").added == gone.removed
    check(store, first.table)
    delete(store)
    done = publish(store, "p")
    assert done.removed > 0
    assert done.runs == first.runs
    kept = [*files_of(first.table), *(str(path) for path in files.folder.rglob("*visible-*")), *listed(first.table)]
    assert [name for name in kept if "plain-wide" in name] == []


def test_a_reader_between_finds_the_run_of_every_layer(store, files, monkeypatch):
    table, seen = f"{files.address}/p", []

    def look():
        if DeltaTable.is_deltatable(table):
            named = {path.partition("run=")[2].partition("/")[0] for path in DeltaTable(table).file_uris()}
            runs = pq.read_table(f"{table}/runs.parquet").column("run").to_pylist()
            assert named <= set(runs), "layers without their run"
            assert len(runs) == len(set(runs))
            seen.append(named)

    for name in ("_create", "_change"):
        change = getattr(publishing, name)
        monkeypatch.setattr(publishing, name, lambda *given, change=change: (look(), change(*given), look()))
    publish(store, "p")
    delete(store)
    add(store, fleet.FleetRun("late", "plus", 1e-3, steps=40))
    publish(store, "p")
    assert len(seen) == 3
    assert seen[-1] - seen[-2] == {"late"}
    assert listed(table).keys() == seen[-1]


def test_a_run_with_a_damaged_file_is_not_published_until_it_is_healed(store, files, tmp_path, caplog):
    path = min(files.folder.rglob("run=plain-wide/**/level=1/*.parquet"))
    good = path.read_bytes()
    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    assert publish(store, "p").runs == len(fleet.FLEET) - 1
    assert f"run plain-wide is not published: its file {path.relative_to(files.folder)} differs" in caplog.text
    path.write_bytes(good)
    done = publish(store, "p")
    assert done.runs == len(fleet.FLEET)
    check(store, done.table)


def test_a_copy_that_a_killed_call_has_left_goes_with_its_run(store, files, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as change:
        change.setattr(publishing, "_create", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(store, "p")
    [copy] = files.copies("p")
    done = publish(store, "p")
    assert [file.path for file in files.copies("p")] == [copy.path], "it is found again"
    shutil.rmtree(Path(done.table, "_delta_log"))
    store.runs.delete("plain-wide", NOW)
    publish(store, "p")
    assert list(files.copies("p")), "a call that goes on may be about to name it"
    monkeypatch.setattr(publishing, "_GRACE_SECONDS", -1.0)
    publish(store, "p")
    assert not list(files.copies("p"))


def test_several_processes_that_publish_at_once_make_one_table(store, files, tmp_path):
    """They create it together, then add and take out runs together: nothing fails, nothing stands there twice."""
    late = [fleet.FleetRun(f"late-{number}", "plus", 1e-3, more=(f"state_zero/{number}",)) for number in range(2)]
    for more in ([], late):
        fleet.fill(store, more)
        fleet.archive_all(store, more)
        start = tmp_path / f"start-{len(more)}"
        others = [fork(PUBLISHER, "-c", PUBLISHES, tmp_path, start) for _ in range(3)]
        start.touch()
        for other in others:
            _, said = other.communicate()
            assert other.returncode == 0, said[-2000:]
        if more:
            store.runs.delete("plain-4", NOW)
    done = publish(store, "p")
    assert (done.added, done.runs) == (0, len(fleet.FLEET) + 1)
    named = files_of(done.table)
    assert len(named) == len(set(named)) == done.files
    sql = "select count(*) as every, count(distinct (run, step, layer)) as distinct_ones from held"
    [counted] = asked(done.table, sql).to_pylist()
    assert counted["every"] == counted["distinct_ones"] > 0
    assert {"state_zero/0", "state_zero/1"} <= {field.name for field in DeltaTable(done.table).schema().fields}


def test_vacuum_of_another_engine_takes_no_file(store, files):
    """Those of a run that goes on are named by no log yet, and older than the week that engines wait."""
    add(store, fleet.FleetRun("late", "plus", 1e-3))
    store.runs.update("late", wire.RunUpdate(state="running"), NOW + 200)
    done = publish(store, "p")
    for path in files.folder.rglob("*.parquet"):
        os.utime(path, (0, 0))
    table = DeltaTable(done.table)
    assert len(list(files.stored())) > done.files
    assert table.vacuum(full=True, dry_run=True) == []
    assert table.vacuum(retention_hours=0, enforce_retention_duration=False, full=True, dry_run=True) != []
    with pytest.raises(DeltaError, match="retention"):
        table.vacuum(retention_hours=168, full=True)


def test_what_retention_left_at_a_coarse_level_alone_is_read_there(store, files):
    """A measured step of which the single point is gone stands in the row of its coarse point, once."""
    assert all(store.retention.expire(run.run_id, {1: NOW + 1e9}) for run in fleet.FLEET)
    table = publish(store, "p").table
    sums = "sum(measured_steps) as measured_steps, sum(lost) as lost"
    found = asked(table, f"select run, level, {sums} from held where layer = 0 group by all").to_pylist()
    for run in fleet.FLEET:
        points = layer_points(store, run.run_id, ["lost", "measured_steps"], ALL)
        for key, values in points.totals.items():
            assert sum(row[key] for row in found if row["run"] == run.run_id) == values[:, 0].sum()
    assert {row["level"] for row in found} >= {16}


def test_of_a_run_that_only_logs_no_file_is_named(store, files):
    """Its file of logged values has other columns, and no layers."""
    store.runs.create("p", wire.RunCreate(run_id="logs"), NOW)
    store.streams.create_attempt("logs", wire.AttemptCreate(launch_id="l", first_step=1), NOW)
    store.streams.create_stream("logs", stream_create("logs-1", launch_id="l", layers=[], statistics=[]), NOW)
    stream = store.streams.stream_record("logs-1")
    logged = [report(i, i + 1, measured=False, scalars={"loss": 1.0 / (i + 1)}) for i in range(80)]
    store.journal.append([ReportGroup(stream, logged)], NOW)
    store.runs.update("logs", wire.RunUpdate(state="finished"), NOW)
    fleet.archive_all(store, [fleet.FleetRun("logs", "plus", 1e-3)])
    assert any("run=logs/attempt=1/logged/" in file.path for file in files.stored())
    table = publish(store, "p").table
    assert not any("run=logs" in path for path in DeltaTable(table).file_uris())
    check(store, table)


def test_the_command_publishes_every_project_into_a_folder_of_one_plain_name(store, tmp_path, monkeypatch):
    add(store, fleet.FleetRun("other", "plus", 1e-3), "a/b c")
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path))
    result = CliRunner().invoke(archive, ["publish", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert '"project": "a/b c"' in result.output
    assert DeltaTable(str(tmp_path / "archive" / "a@2Fb@20c")).to_pyarrow_table().num_rows == 3 * 80
    for name, folder in (("demo-1.x", "demo-1.x"), ("../x", "@2E.@2Fx"), ("_log", "@5Flog")):
        assert project_folder(name) == folder
    assert len({project_folder("x" * 500), project_folder("x" * 501)}) == 2
    assert len(project_folder("ü" * 512)) < 200


RANKS = fleet.FleetRun("ranks", "plus", 1e-3)


def of_a_rank(store, rank):
    """Another rank's reports of a run that has ended."""
    layers = [wire.Layer(name=name, shape=[16, 16], dtype="bfloat16", elements=256) for name in fleet.NAMES]
    more = {"layers": layers, "statistics": RANKS.keys, "watch": watch("plus"), "rank": rank, "world_size": 2}
    store.streams.create_stream("ranks", stream_create(f"ranks-{rank}", "launch-1", **more), NOW)
    stream = store.streams.stream_record(f"ranks-{rank}")
    reports = [fleet.report_of(RANKS, seq, seq + 1, 1) for seq in range(RANKS.steps)]
    store.journal.append([ReportGroup(stream, reports)], NOW + rank)
    store.runs.update("ranks", wire.RunUpdate(state="finished"), NOW + 100)


@pytest.mark.drawn
@pytest.mark.parametrize("archived_before", [False, True])
@pytest.mark.parametrize("published_before", [False, True])
def test_what_a_rank_sent_late_is_in_the_same_rows(store, archived_before, published_before):
    """The first rank is sealed alone: the other's reports are parts of their own, of the same steps."""
    store.runs.create("p", wire.RunCreate(run_id="ranks"), NOW)
    store.streams.create_attempt("ranks", wire.AttemptCreate(launch_id="launch-1", first_step=1), NOW)
    of_a_rank(store, 0)
    while store.sealing.seal("ranks", NOW + 10_000) or (archived_before and store.archiving.archive("ranks")):
        pass
    if published_before:
        publish(store, "p")
    of_a_rank(store, 1)
    fleet.archive_all(store, [RANKS])
    done = publish(store, "p")
    check(store, done.table, [RANKS])
    assert layer_points(store, "ranks", fleet.KEYS[:1], ALL).ranks.tolist() == [2] * RANKS.steps
    assert publish(store, "p").added == 0
