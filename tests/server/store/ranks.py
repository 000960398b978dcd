"""Ranks of one run: merged, waited for, given up, late. Every backend runs it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from collage_server.errors import Unprocessable
from collage_server.store import ReportGroup, Selection, schema
from collage_server.store.reading import points as reading

from collage_monitor import wire
from collage_monitor.statistics import finish
from tests.server.reads import latest_point, layer_points, model_points
from tests.server.samples import STATISTICS, block, report, stream_create
from tests.server.store.contract import NOW, StoreContract
from tests.server.store.seen import AFTER_SILENCE, ALL, plain, rows, seal_all

__all__ = ["RanksContract", "Senders"]


class Senders:
    """Ways to fill a store with what one or several ranks report."""

    fill = staticmethod(StoreContract.fill)
    append = staticmethod(StoreContract.append)

    def ranks(self, store, count, replica=lambda rank: 0):
        store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
        store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=1), NOW)
        streams = []
        for rank in range(count):
            create = stream_create(f"s{rank}", rank=rank, world_size=count, replica=replica(rank))
            store.streams.create_stream("r1", create, NOW)
            streams.append(store.streams.stream_record(f"s{rank}"))
        return streams

    def send(self, store, stream, steps, rank=0, first_seq=0, **more):
        reports = [report(first_seq + i, step, rank=rank, **more) for i, step in enumerate(steps)]
        return self.append(store, stream, *reports)


class RanksContract(Senders):
    """Subclasses give the fixtures `store` and `reopen`, with the contract's small limits."""

    def test_the_slowest_live_rank_is_waited_for(self, store):
        first, second = self.ranks(store, 2)
        self.send(store, first, range(1, 41), 0)
        self.send(store, second, range(1, 11), 1)
        assert seal_all(store) == 0
        self.send(store, second, range(11, 33), 1, first_seq=10)
        assert seal_all(store) == 1
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2] * 32 + [1] * 8
        with pytest.raises(Unprocessable, match="2 ranks"):
            layer_points(store, "r1", ["lost"], Selection(rank=1))

    def test_a_rank_that_has_fallen_silent_holds_nobody_back(self, store):
        first, second = self.ranks(store, 2)
        self.send(store, first, range(1, 11), 0)
        self.send(store, second, range(1, 11), 1)
        store.journal.append([ReportGroup(first, [report(i, i + 1) for i in range(10, 50)])], NOW + 500.0)
        assert (seal_all(store), latest_point(store, "r1").step) == (0, 10)
        store.journal.append([ReportGroup(first, [report(50, 51)])], NOW + 601.0)
        assert (seal_all(store), latest_point(store, "r1").step) == (1, 51)
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2] * 10 + [1] * 41

    def test_the_newest_step_moves_on_when_a_rank_falls_silent_while_another_only_logs(self, store, reopen):
        """Every server must say the same, whatever it has asked before."""
        first, second = self.ranks(store, 2)
        self.send(store, first, range(1, 21), 0)
        self.send(store, second, range(1, 11), 1)
        assert latest_point(store, "r1").step == 10
        store.journal.append([ReportGroup(first, [report(20, 21, measured=False)])], NOW + 601.0)
        newest = latest_point(store, "r1").step
        assert newest == latest_point(reopen(), "r1").step == 20

    def test_ranks_that_are_left_behind_a_silent_one_wait_for_each_other(self, store):
        streams = self.ranks(store, 3)
        self.send(store, streams[0], range(1, 41), 0)
        assert seal_all(store) == 1
        for rank, last in ((1, 21), (2, 11)):
            reports = [report(i, i + 1, rank=rank) for i in range(last)]
            store.journal.append([ReportGroup(streams[rank], reports)], NOW + 900.0)
        seal_all(store)
        assert latest_point(store, "r1").step == 11

    def test_a_rank_that_logs_but_measures_no_more_holds_nobody_back(self, store):
        """It is waited for over 64 measured steps of another that it has passed; when it measures again, anew."""
        first, second = self.ranks(store, 2)
        for rank, stream in enumerate((first, second)):
            self.send(store, stream, range(1, 11), rank)
        self.send(store, first, range(11, 80), first_seq=10)
        self.send(store, second, range(11, 74), 1, first_seq=10, measured=False)
        assert (seal_all(store), latest_point(store, "r1").step) == (0, 10)
        self.send(store, second, range(74, 80), 1, first_seq=73, measured=False)
        assert (seal_all(store), latest_point(store, "r1").step) == (2, 79)
        self.send(store, first, range(80, 120), first_seq=79)
        self.send(store, second, range(80, 90), 1, first_seq=79, measured=False)
        assert (seal_all(store), latest_point(store, "r1").step) == (1, 119)
        self.send(store, second, range(100, 110), 1, first_seq=89)
        assert latest_point(store, "r1").step == 109
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2] * 10 + [1] * 89 + [2] * 10 + [1] * 10

    def test_a_run_that_is_over_waits_for_no_rank(self, store, reopen):
        first, second = self.ranks(store, 2)
        self.send(store, first, range(1, 16), 0)
        self.send(store, second, range(1, 11), 1)
        assert latest_point(store, "r1").step == 10
        store.runs.update("r1", wire.RunUpdate(state="failed"), NOW)
        assert latest_point(store, "r1").step == 15
        assert seal_all(store) == 0, "what the second rank measured may still come, to be compared"
        assert seal_all(store, now=AFTER_SILENCE) == 1
        assert latest_point(store, "r1").step == latest_point(reopen(), "r1").step == 15

    @pytest.mark.parametrize("sealed", [False, True])
    def test_a_newest_scalar_that_a_newer_attempt_hides_leaves_the_one_before_it(self, store, sealed):
        """Highest step first, then the lowest rank; what only an older attempt has logged is looked for there."""
        for rank, stream in enumerate(self.ranks(store, 2)):
            nan = float("nan") if rank == 0 else 9.0
            logged = {
                850: {"validation": 2.5 + rank, "note": nan},
                1000: {"validation": 2.4, "loss": 2.3, "note": 1.0},
                840: {"validation": 7.0, "loss": 4.0},
                870 + rank: {"odd": float(rank)},
                900: {"odd": 5.0},
            }
            reports = [
                report(i, step, measured=False, scalars=held) for i, (step, held) in enumerate(logged.items())
            ]
            self.append(store, stream, *reports)
        store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-2", first_step=900), NOW)
        store.streams.create_stream("r1", stream_create("later", launch_id="launch-2"), NOW)
        found = {"validation": (850, 2.5), "note": (850, "NaN"), "odd": (871, 1.0), "loss": (840, 4.0)}
        assert newest_of(store) == found
        self.append(store, store.streams.stream_record("later"), report(0, 900, scalars={"loss": 1.0}))
        if sealed:
            assert seal_all(store) > 0
        assert newest_of(store) == found | {"loss": (900, 1.0)}

    def test_columns_kept_in_memory_are_let_go_when_their_chunk_changes(self, store, reopen, monkeypatch):
        first, second = self.ranks(store, 2)
        self.send(store, first, range(1, 65), 0)
        seal_all(store)
        asked = Selection(points=2, extremes_of=("edq_ratio",))
        before = model_points(store, "r1", None, asked)
        assert before.counts.tolist() == [16] * 4
        assert before.totals["lost"].tolist() == [16 * 60.0] * 4
        with monkeypatch.context() as patch:
            patch.setattr(reading, "read_model_data", lambda *_: 1 / 0)
            again = model_points(store, "r1", ["lost"], asked)
        assert again.totals["lost"].tolist() == before.totals["lost"].tolist()
        self.send(store, second, range(1, 33), 1)
        joined = [*[1.0 * 180] * 32, 16 * 60.0, 16 * 60.0]
        assert model_points(store, "r1", ["lost"], asked).totals["lost"].tolist() == joined
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        seal_all(store, now=AFTER_SILENCE)
        after = model_points(store, "r1", None, asked)
        assert after.totals["lost"].tolist() == [16 * 180.0] * 2 + [16 * 60.0] * 2
        assert plain(model_points(reopen(), "r1", None, asked)) == plain(after)

    def test_late_parts_take_no_extremes_from_coarse_points(self, store):
        """A late part may hold few statistics, and stand in the newest chunk, which has no coarse points yet."""
        first, second = self.ranks(store, 2)
        self.send(store, first, range(1, 71), 0)
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        seal_all(store, now=AFTER_SILENCE)
        few = np.arange(len(STATISTICS))[:, None] < 12
        for step in (3, 5, 6, 20, 66):
            values = np.where(few, block(step, 1), np.nan)
            self.append(store, second, report(step, step, rank=1, values=values))
        seal_all(store, now=AFTER_SILENCE)
        assert rows(store, schema.report) == 0
        for metric in ("edq_ratio", "grad_norm", "state_decrement_ratio/exp_avg_sq"):
            single = finish(metric, model_points(store, "r1", None, ALL).totals)[:64].reshape(4, 16)
            points = model_points(store, "r1", None, Selection(points=2, extremes_of=(metric,)))
            assert points.counts.tolist() == [16] * 4 + [1] * 6
            low, high = points.extremes[metric]
            assert low[:4].tolist() == single.min(axis=1).tolist(), metric
            assert high[:4].tolist() == single.max(axis=1).tolist(), metric
        layers = layer_points(store, "r1", STATISTICS, Selection(points=2, extremes_of=("edq_ratio",)))
        assert not np.isnan(layers.extremes["edq_ratio"][0][:4]).any()

    def test_late_parts_of_a_chunk_that_is_open_do_not_fill_it(self, store):
        """A chunk is whole when it has its measured points, however many parts told of them."""
        store.sealing.limits = dataclasses.replace(store.sealing.limits, part_points=8)
        first, second = self.ranks(store, 2)
        for start in range(0, 64, 8):
            for rank, stream in enumerate((first, second)):
                reports = [report(start + i, start + i + 1, rank=rank) for i in range(8)]
                store.journal.append([ReportGroup(stream, reports)], NOW + 2000.0 * start)
                assert seal_all(store) == 1
        points = model_points(store, "r1", ["lost"], Selection(points=1))
        assert points.totals["lost"].tolist() == [16 * 180.0] * 4
        assert points.counts.tolist() == [16] * 4


def newest_of(store):
    return {name: (held.step, held.value) for name, held in store.runs.get("r1").scalars.items()}
