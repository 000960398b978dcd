"""What every backend must do about data that leaves it: deletion in slices, and retention by level."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from collage_server.errors import Gone
from collage_server.store import Selection, schema
from collage_server.store.chunks.blobs import read_chunk_infos
from collage_server.store.sealing import retention
from sqlalchemy import insert

from collage_monitor import wire
from tests.server.reads import layer_points, model_points
from tests.server.samples import STATISTICS, report
from tests.server.store.sending import append, fill, launch, register, send
from tests.server.store.stores import ALL, LIMITS, NOW, purge_all, rows, seal_all
from tests.waiting import PATIENCE_SECONDS

NEVER = {1: NOW + 1e9, 16: NOW + 1e9}
"""Horizons behind which everything lies: what may go, goes. Attempts were created at NOW."""
CHUNK = LIMITS.points
CHUNKS = (schema.layer_chunk, schema.model_chunk, schema.point_chunk)


def filled(store, steps=4 * CHUNK, run_id="r1"):
    """A sealed run of so many measured steps, one report each; its chunks are whole but for the last."""
    stream = fill(store, run_id, f"{run_id}-s")
    send(store, stream, range(1, steps + 1))
    seal_all(store, run_id)
    return stream


def infos(store, run_id="r1"):
    with store.reading() as connection:
        return read_chunk_infos(connection, [run_id])[run_id]


def of_run(store, table, run_id="r1"):
    return rows(store, table, table.c.run_id == run_id)


def coarse(array, level):
    """Sums over `level` neighbours, within each chunk."""
    chunks = np.asarray(array).reshape(-1, CHUNK)
    return np.concatenate([np.add.reduceat(row, np.arange(0, CHUNK, level)) for row in chunks])


class LifeContract:
    """Subclasses give the fixtures `store` and `reopen`."""

    def test_raw_points_go_and_their_sums_stay(self, store):
        filled(store)
        raw = model_points(store, "r1", STATISTICS, ALL)
        layers = layer_points(store, "r1", ["lost"], ALL)
        assert store.retention.expire("r1", {1: NOW + 1e9}) == 3
        assert [sorted(info.levels) for info in infos(store)] == [[16, 256]] * 3 + [[1, 16, 256]]
        points = model_points(store, "r1", STATISTICS, ALL)
        assert points.counts.tolist() == [16] * 6 + [1] * CHUNK
        assert points.steps.tolist() == [*range(16, 97, 16), *range(97, 129)]
        for key in ("lost", "intended_squared_sum", "measured_steps"):
            expected = [*coarse(raw.totals[key][:96], 16), *raw.totals[key][96:]]
            np.testing.assert_allclose(points.totals[key], expected, rtol=1e-12)
        by_layer = layer_points(store, "r1", ["lost"], ALL)
        for layer in range(3):
            expected = [*coarse(layers.totals["lost"][:96, layer], 16), *layers.totals["lost"][96:, layer]]
            np.testing.assert_allclose(by_layer.totals["lost"][:, layer], expected, rtol=1e-12)
        part = model_points(store, "r1", ["lost"], Selection(first_step=20, last_step=60))
        assert part.steps.tolist() == [32, 48], "of a frozen chunk"
        few = model_points(store, "r1", ["lost"], Selection(points=2, extremes_of=("edq_ratio",)))
        assert few.counts.sum() == 4 * CHUNK
        assert not np.isnan(few.extremes["edq_ratio"][0][:3]).any()

    def test_then_the_next_level_and_never_the_last(self, store, monkeypatch):
        filled(store)
        assert store.retention.expire("r1", NEVER) == 6
        assert [sorted(info.levels) for info in infos(store)] == [[256]] * 3 + [[1, 16, 256]]
        assert model_points(store, "r1", ["lost"], ALL).counts.tolist() == [CHUNK] * 3 + [1] * CHUNK
        # Every round would read a point of every chunk that a run ever had.
        monkeypatch.setattr(retention, "_last_point", lambda *_: pytest.fail("a chunk without the level is read"))
        assert store.retention.expire("r1", NEVER) == 0

    def test_a_chunk_that_is_not_whole_stays(self, store):
        filled(store, steps=CHUNK + 5)
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        seal_all(store)
        assert store.retention.expire("r1", NEVER) == 2
        assert [sorted(info.levels) for info in infos(store)] == [[256], [1]]

    def test_a_stream_that_joins_later_knows_the_horizon(self, store):
        """What is only logged is never late, and a newer attempt may begin anywhere."""
        filled(store)
        store.retention.expire("r1", {1: NOW + 1e9})
        stream = register(store, "joined", rank=1)
        beyond = report(1, 3 * CHUNK + 1, rank=1)
        for reports, told in (
            ([report(0, 3 * CHUNK, rank=1), beyond], (1, 0, (0,))),
            ([beyond, report(2, 3 * CHUNK, measured=False)], (1, 1, ())),
        ):
            outcome = append(store, stream, *reports)
            assert (outcome.accepted, outcome.duplicates, outcome.late) == told
        assert append(store, launch(store, 2, 1, "s-2"), report(0, 5)).accepted == 1

    def test_totals_that_arrive_between_look_and_freeze_put_it_off(self, store, monkeypatch):
        stream = filled(store)
        seal_late_reports = store.retention._seal_late_reports

        def settle_then_another_arrives(run_id):
            seal_late_reports(run_id)
            monkeypatch.setattr(store.retention, "_seal_late_reports", seal_late_reports)
            assert append(store, stream, report(1000, 5)).accepted == 1

        monkeypatch.setattr(store.retention, "_seal_late_reports", settle_then_another_arrives)
        assert store.retention.expire("r1", {1: NOW + 1e9}) == 0
        assert store.retention.expire("r1", {1: NOW + 1e9}) == 3

    def test_whatever_the_race_nothing_acknowledged_is_dropped(self, store):
        """One rank late while retention freezes chunk after chunk: what was acknowledged is in the sums."""
        filled(store)
        stream = register(store, "slow", rank=1, world_size=2)
        acknowledged, started = set(), threading.Event()

        def report_late():
            for seq, step in enumerate(range(1, 3 * CHUNK + 1)):
                if not append(store, stream, report(seq, step, rank=1)).late:
                    acknowledged.add(step)
                started.set()

        with ThreadPoolExecutor(1) as pool:
            sender = pool.submit(report_late)
            started.wait(PATIENCE_SECONDS)
            for horizon in range(1, 4):
                while not store.retention.expire("r1", {1: NOW + horizon * CHUNK + 0.5}) and sender.running():
                    pass
            sender.result()
        store.retention.expire("r1", {1: NOW + 1e9})
        lost = model_points(store, "r1", ["lost"], Selection(last_step=3 * CHUNK))
        expected = sum(10.0 * 6 * (1 + 2 * (step in acknowledged)) for step in range(1, 3 * CHUNK + 1))
        assert lost.totals["lost"].sum() == expected

    def test_an_interrupted_drop_is_finished(self, store, monkeypatch):
        filled(store)
        with monkeypatch.context() as broken:
            broken.setattr("collage_server.store.sealing.slice_deletion.delete_slice", lambda *_, rows: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.retention.expire("r1", {1: NOW + 1e9})
        assert model_points(store, "r1", ["lost"], ALL).counts.sum() == 4 * CHUNK
        fine = [(table, table.c.level == 1, table.c.chunk < 3) for table in CHUNKS]
        assert rows(store, *fine[0])
        store.retention.expire("r1", {1: NOW + 1e9})
        assert [rows(store, *of_table) for of_table in fine] == [0, 0, 0]

    def test_a_deleted_run_is_invisible_at_once_and_its_rows_go_in_slices(self, store, reopen, monkeypatch):
        monkeypatch.setattr("collage_server.store.sealing.retention._PURGED_AT_ONCE", 0)
        filled(store)
        filled(store, CHUNK, "r2")
        store.runs.delete("r1", NOW)
        for ask in (lambda: store.runs.get("r1"), lambda: model_points(store, "r1", None, ALL)):
            with pytest.raises(Gone):
                ask()
        assert of_run(store, schema.layer_chunk)
        assert store.retention.purge(1)
        store = reopen()
        purge_all(store, 1)
        for table in (*CHUNKS, schema.report, schema.scalar_chunk):
            assert of_run(store, table) == 0, table
        assert of_run(store, schema.layer_chunk, "r2")
        assert len(model_points(store, "r2", None, ALL).steps) == CHUNK

    def test_a_deletion_takes_more_rows_a_transaction_while_that_is_quick(self, store, monkeypatch):
        """A run of 10,000 layers and 7 chunks had 70,000 rows somewhere: 48 a commit took more than a minute."""
        filled(store, CHUNK, "r1")
        place = {"run_id": "r1", "attempt": 9, "level": 1, "part": 0}
        held = {"point_count": 1, "layer_count": 1, "data": b"x"}
        many = [place | held | {"chunk": n // 1000, "entry": n % 1000} for n in range(7000)]
        with store.writing() as connection:
            connection.execute(insert(schema.layer_chunk), many)
        commits = mock.Mock(wraps=store.freeing)
        monkeypatch.setattr(store, "freeing", commits)
        monkeypatch.setattr("collage_server.store.sealing.slice_deletion.time.perf_counter", lambda: 0.0)
        store.runs.delete("r1", NOW)
        purge_all(store, 16)
        assert of_run(store, schema.layer_chunk) == 0
        assert commits.call_count < 60, "146 slices of 48 rows"

    def test_rows_of_a_run_that_a_server_deleted_before_it_ended_go_too(self, store, monkeypatch):
        monkeypatch.setattr("collage_server.store.sealing.retention._SEARCH_SECONDS", 0.0)
        monkeypatch.setattr("collage_server.store.sealing.retention._PURGED_AT_ONCE", 0)
        filled(store)
        assert not store.retention.purge(1)
        with monkeypatch.context() as other:
            other.setattr(store.runs, "_begin_purge", lambda _: None)
            store.runs.delete("r1", NOW)
        purge_all(store, 1)
        assert of_run(store, schema.layer_chunk) == 0

    def test_sizes_are_known(self, store):
        filled(store)
        sizes = store.sizes()
        assert sizes.used_bytes > 1000
        assert sizes.free_bytes is None or sizes.free_bytes > 0
