"""A project's Delta table: every visible measured step in one row a layer, in step with what the database holds."""

import os
import shutil
import time
from collections.abc import Callable
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


def rows(table):
    """What an engine without a filter reads, by run: the steps, and {statistic: [step, layer]}."""
    with duckdb.connect() as connection:
        connection.register("held", DeltaTable(table).to_pyarrow_dataset())
        found = connection.sql("select * from held order by run, step, layer").arrow().read_all()
    runs, first = np.unique(found.column("run").to_numpy(), return_index=True)
    held = {}
    for run, own in zip(runs, np.split(np.arange(found.num_rows), first[1:]), strict=True):
        part = found.slice(own[0], len(own))
        steps = part.column("step").to_numpy().reshape(-1, 3)
        assert (steps == steps[:, :1]).all()
        known = (key for key in part.schema.names if key in fleet.KEYS)
        held[run] = steps[:, 0], {key: part.column(key).to_numpy().reshape(-1, 3) for key in known}
    return held


def check(store, table):
    """The table's rows are the API's points, bit for bit, each once."""
    held = rows(table)
    for run in fleet.FLEET:
        steps, values = held[run.run_id]
        points = layer_points(store, run.run_id, fleet.KEYS, ALL)
        assert steps.tolist() == points.steps.tolist() == list(range(1, run.steps + 1))
        assert set(values) == set(fleet.KEYS)
        for key in fleet.KEYS:
            np.testing.assert_array_equal(values[key], points.totals[key])


def test_every_visible_step_stands_in_one_row_a_layer_whoever_reads(store, files):
    """Of the run that was resumed, too: what its second launch hides of a file is not in the copy of it."""
    done = publish(store, "p")
    assert (done.runs, done.added, done.removed) == (len(fleet.FLEET), done.files, 0)
    check(store, done.table)
    copies = [path for path in DeltaTable(done.table).file_uris() if "visible-" in path]
    assert len(copies) == 1, "files that nobody hides are named as they are"
    whole = Path(files.folder, "p")
    assert len(list(whole.rglob("*.parquet"))) - len(list(files.stored())) == 2, "the copy, and the runs"


def test_a_second_call_changes_nothing_and_a_new_run_adds_its_files_alone(store, files):
    first = publish(store, "p")
    version = DeltaTable(first.table).version()
    again = publish(store, "p")
    assert (again.added, again.removed, again.files) == (0, 0, first.files)
    assert DeltaTable(first.table).version() == version
    more = fleet.FleetRun("late", "plus", 1e-3, more=("state_zero/exp_avg",), steps=40)
    fleet.fill(store, [more])
    assert publish(store, "p").runs == first.runs, "nothing of it is archived yet"
    fleet.archive_all(store, [more])
    done = publish(store, "p")
    assert (done.runs, done.removed, done.files) == (first.runs + 1, 0, first.files + done.added)
    assert "state_zero/exp_avg" in DeltaTable(first.table).schema().to_json()
    check(store, first.table)


def test_a_deleted_run_leaves_the_table_and_nothing_of_it_is_kept(store, files):
    table = publish(store, "p").table
    store.runs.delete("plain-wide", NOW)
    while store.retention.purge(100):
        pass
    done = publish(store, "p")
    assert done.removed > 0
    assert done.runs == len(fleet.FLEET) - 1
    assert not any("plain-wide" in path for path in DeltaTable(table).file_uris())
    assert not any("plain-wide" in str(path) and "visible-" in path.name for path in files.folder.rglob("*"))
    assert "plain-wide" not in pq.read_table(f"{table}/runs.parquet").column("run").to_pylist()


@pytest.fixture
def between(monkeypatch):
    """Calls a function before and after each change of a log."""
    looks: list[Callable[[], None]] = []

    def look_around(change):
        def changed(*arguments):
            looks[-1]()
            change(*arguments)
            looks[-1]()

        return changed

    for name in ("_create", "_change"):
        monkeypatch.setattr(publishing, name, look_around(getattr(publishing, name)))
    return looks


def test_a_reader_between_finds_the_run_of_every_layer(store, files, between):
    table, seen = f"{files.address}/p", []

    def look():
        if DeltaTable.is_deltatable(table):
            named = {path.partition("run=")[2].partition("/")[0] for path in DeltaTable(table).file_uris()}
            listed = pq.read_table(f"{table}/runs.parquet").column("run").to_pylist()
            assert named <= set(listed), "layers without their run"
            assert len(listed) == len(set(listed))
            seen.append(named)

    between.append(look)
    publish(store, "p")
    store.runs.delete("plain-wide", NOW)
    while store.retention.purge(100):
        pass
    more = fleet.FleetRun("late", "plus", 1e-3, steps=40)
    fleet.fill(store, [more])
    fleet.archive_all(store, [more])
    publish(store, "p")
    assert len(seen) == 3
    assert seen[-1] - seen[-2] == {"late"}
    assert sorted(pq.read_table(f"{table}/runs.parquet").column("run").to_pylist()) == sorted(seen[-1])


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


@pytest.mark.slow
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
    named = DeltaTable(done.table).file_uris()
    assert len(named) == len(set(named)) == done.files
    with duckdb.connect() as connection:
        connection.register("held", DeltaTable(done.table).to_pyarrow_dataset())
        [(every, distinct)] = connection.sql(
            "select count(*), count(distinct (run, step, layer)) from held"
        ).fetchall()
    assert every == distinct > 0
    assert {f"state_zero/{number}" for number in range(2)} <= {
        f.name for f in DeltaTable(done.table).schema().fields
    }


def test_a_log_that_was_deleted_is_made_anew_from_the_database(store, files):
    done = publish(store, "p")
    named = sorted(DeltaTable(done.table).file_uris())
    shutil.rmtree(Path(done.table, "_delta_log"))
    again = publish(store, "p")
    assert again.added == done.files
    assert sorted(DeltaTable(done.table).file_uris()) == named
    check(store, done.table)


def test_a_run_that_goes_on_leaves_the_table_until_it_ends_again(store, files):
    publish(store, "p")
    store.runs.update("plus-3-a", wire.RunUpdate(state="running"), NOW + 200)
    done = publish(store, "p")
    assert (done.runs, done.added) == (len(fleet.FLEET) - 1, 0)
    assert done.removed > 0
    store.runs.update("plus-3-a", wire.RunUpdate(state="finished"), NOW + 300)
    assert publish(store, "p").added == done.removed
    check(store, done.table)


def test_sweeping_leaves_the_table_alone(store, files, monkeypatch):
    """Its files are named by no row of the database: the log, its checkpoints, the runs, copies."""
    done = publish(store, "p")
    DeltaTable(done.table).create_checkpoint()
    monkeypatch.setattr(archiving, "_GRACE_SECONDS", -3600.0)
    before = sorted(files.folder.rglob("*"))
    assert store.archiving.sweep(time.time()) == 0
    assert sorted(files.folder.rglob("*")) == before
    check(store, done.table)


def test_vacuum_of_another_engine_takes_no_file(store, files):
    """Those of a run that goes on are named by no log yet, and older than the week that engines wait."""
    fleet.fill(store, [fleet.FleetRun("late", "plus", 1e-3)])
    fleet.archive_all(store, [fleet.FleetRun("late", "plus", 1e-3)])
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
    with duckdb.connect() as connection:
        connection.register("held", DeltaTable(table).to_pyarrow_dataset())
        found = connection.sql(
            "select run, level, sum(measured_steps), min(points), sum(lost) from held "
            "where layer = 0 group by all order by all"
        ).fetchall()
    for run in fleet.FLEET:
        points = layer_points(store, run.run_id, ["lost", "measured_steps"], ALL)
        mine = [row for row in found if row[0] == run.run_id]
        assert sum(row[2] for row in mine) == points.totals["measured_steps"][:, 0].sum()
        assert sum(row[4] for row in mine) == points.totals["lost"][:, 0].sum()
    assert {row[1] for row in found} >= {16}


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


def test_the_table_of_runs_has_what_questions_join(store, files):
    table = publish(store, "p").table
    held = {row["run"]: row for row in pq.read_table(f"{table}/runs.parquet").to_pylist()}
    assert sorted(held) == sorted(run.run_id for run in fleet.FLEET)
    row = held["light-4-wide"]
    assert (row["strategy"], row["dtype"], row["elements"], row["layers"]) == ("light", "bfloat16", 3 * 64 * 16, 3)
    assert (row["config"], row["findings"]) == ('{"learning_rate": 0.0001, "seed": 0}', "{}")
    assert (row["state"], row["last_step"], row["created_at"].timestamp()) == ("finished", 80, NOW)


def test_the_command_publishes_every_project(store, tmp_path, monkeypatch):
    fleet.fill(store, [fleet.FleetRun("other", "plus", 1e-3)], project="a/b c")
    fleet.archive_all(store, [fleet.FleetRun("other", "plus", 1e-3)])
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path))
    result = CliRunner().invoke(archive, ["publish", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert '"project": "a/b c"' in result.output
    assert DeltaTable(str(tmp_path / "archive" / "a@2Fb@20c")).to_pyarrow_table().num_rows == 3 * 80


def test_a_project_folder_is_one_plain_name():
    assert project_folder("demo-1.x") == "demo-1.x"
    assert project_folder("../x") == "@2E.@2Fx"
    assert project_folder("_log") == "@5Flog"
    assert len({project_folder("x" * 500), project_folder("x" * 501)}) == 2
    assert len(project_folder("ü" * 512)) < 200


RANKS = fleet.FleetRun("ranks", "plus", 1e-3)


def launched_on_two_ranks(store):
    """A run that has ended; a function that stores a rank's reports."""
    store.runs.create("p", wire.RunCreate(run_id="ranks"), NOW)
    store.streams.create_attempt("ranks", wire.AttemptCreate(launch_id="launch-1", first_step=1), NOW)
    layers = [wire.Layer(name=name, shape=[16, 16], dtype="bfloat16", elements=256) for name in fleet.NAMES]

    def reported(rank):
        more = {"layers": layers, "statistics": RANKS.keys, "watch": watch("plus")}
        create = stream_create(f"ranks-{rank}", "launch-1", rank=rank, world_size=2, **more)
        store.streams.create_stream("ranks", create, NOW)
        stream = store.streams.stream_record(f"ranks-{rank}")
        reports = [fleet._report(RANKS, seq, seq + 1, 1) for seq in range(RANKS.steps)]
        store.journal.append([ReportGroup(stream, reports)], NOW + rank)
        store.runs.update("ranks", wire.RunUpdate(state="finished"), NOW + 100)

    return reported


@pytest.mark.drawn
@pytest.mark.parametrize("archived_before", [False, True])
@pytest.mark.parametrize("published_before", [False, True])
def test_what_a_rank_sent_late_is_in_the_same_rows(store, archived_before, published_before):
    """The first rank is sealed alone: the other's reports are parts of their own, of the same steps."""
    reported = launched_on_two_ranks(store)
    reported(0)
    while store.sealing.seal("ranks", NOW + 10_000) or (archived_before and store.archiving.archive("ranks")):
        pass
    if published_before:
        publish(store, "p")
    reported(1)
    fleet.archive_all(store, [RANKS])
    done = publish(store, "p")
    steps, values = rows(done.table)["ranks"]
    points = layer_points(store, "ranks", fleet.KEYS, ALL)
    assert points.ranks.tolist() == [2] * RANKS.steps
    assert steps.tolist() == points.steps.tolist() == list(range(1, RANKS.steps + 1))
    for key in fleet.KEYS:
        np.testing.assert_array_equal(values[key], points.totals[key])
    assert publish(store, "p").added == 0
