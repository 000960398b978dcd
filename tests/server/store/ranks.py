"""Ranks of one run: merged, waited for, late, replicas of each other, and steps in parts. Every backend runs it."""

import dataclasses

import msgspec
import numpy as np
import pytest
from collage_server.errors import Unprocessable
from collage_server.store import Selection, schema
from collage_server.store.reading import points as reading
from sqlalchemy import text

from collage_monitor import wire
from collage_monitor.statistics import finish as finished
from tests.server.reads import latest_point, layer_points, model_points
from tests.server.samples import LAYERS, STATISTICS, block, report
from tests.server.store.seen import plain
from tests.server.store.sending import append, launch, ranks, register, send, with_more
from tests.server.store.stores import AFTER_SILENCE, ALL, NOW, finish, rows, seal_all

KEYS = ["replica_checksum", "replica_checksum_elements"]
GOOD = [5.0, 6.0, 7.0]


class RanksContract:
    """Subclasses give the fixtures `store` and `reopen`, with the contract's small limits."""

    def test_the_slowest_live_rank_is_waited_for(self, store):
        first, second = ranks(store, 2)
        send(store, first, range(1, 41), 0)
        send(store, second, range(1, 11), 1)
        assert seal_all(store) == 0
        send(store, second, range(11, 33), 1, first_seq=10)
        assert seal_all(store) == 1
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2] * 32 + [1] * 8
        with pytest.raises(Unprocessable, match="2 ranks"):
            layer_points(store, "r1", ["lost"], Selection(rank=1))

    def test_a_rank_that_has_fallen_silent_holds_nobody_back(self, store):
        first, second = ranks(store, 2)
        send(store, first, range(1, 11), 0)
        send(store, second, range(1, 11), 1)
        send(store, first, range(11, 51), first_seq=10, now=NOW + 500.0)
        assert (seal_all(store), latest_point(store, "r1").step) == (0, 10)
        send(store, first, [51], first_seq=50, now=NOW + 601.0)
        assert (seal_all(store), latest_point(store, "r1").step) == (1, 51)
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2] * 10 + [1] * 41

    def test_the_newest_step_moves_on_when_a_rank_falls_silent_while_another_only_logs(self, store, reopen):
        """Every server must say the same, whatever it has asked before."""
        first, second = ranks(store, 2)
        send(store, first, range(1, 21), 0)
        send(store, second, range(1, 11), 1)
        assert latest_point(store, "r1").step == 10
        send(store, first, [21], first_seq=20, now=NOW + 601.0, measured=False)
        newest = latest_point(store, "r1").step
        assert newest == latest_point(reopen(), "r1").step == 20

    def test_ranks_that_are_left_behind_a_silent_one_wait_for_each_other(self, store):
        streams = ranks(store, 3)
        send(store, streams[0], range(1, 41), 0)
        assert seal_all(store) == 1
        for rank, last in ((1, 21), (2, 11)):
            send(store, streams[rank], range(1, last + 1), rank, now=NOW + 900.0)
        seal_all(store)
        assert latest_point(store, "r1").step == 11

    def test_a_rank_that_logs_but_measures_no_more_holds_nobody_back(self, store):
        """It is waited for over 64 measured steps of another that it has passed; when it measures again, anew."""
        first, second = ranks(store, 2)
        for rank, stream in enumerate((first, second)):
            send(store, stream, range(1, 11), rank)
        send(store, first, range(11, 80), first_seq=10)
        send(store, second, range(11, 74), 1, first_seq=10, measured=False)
        assert (seal_all(store), latest_point(store, "r1").step) == (0, 10)
        send(store, second, range(74, 80), 1, first_seq=73, measured=False)
        assert (seal_all(store), latest_point(store, "r1").step) == (2, 79)
        send(store, first, range(80, 120), first_seq=79)
        send(store, second, range(80, 90), 1, first_seq=79, measured=False)
        assert (seal_all(store), latest_point(store, "r1").step) == (1, 119)
        send(store, second, range(100, 110), 1, first_seq=89)
        assert latest_point(store, "r1").step == 109
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2] * 10 + [1] * 89 + [2] * 10 + [1] * 10

    def test_a_run_that_is_over_waits_for_no_rank(self, store, reopen):
        first, second = ranks(store, 2)
        send(store, first, range(1, 16), 0)
        send(store, second, range(1, 11), 1)
        assert latest_point(store, "r1").step == 10
        store.runs.update("r1", wire.RunUpdate(state="failed"), NOW)
        assert latest_point(store, "r1").step == 15
        assert seal_all(store) == 0, "what the second rank measured may still come, to be compared"
        assert seal_all(store, now=AFTER_SILENCE) == 1
        assert latest_point(store, "r1").step == latest_point(reopen(), "r1").step == 15

    @pytest.mark.parametrize("sealed", [False, True])
    def test_a_newest_scalar_that_a_newer_attempt_hides_leaves_the_one_before_it(self, store, sealed):
        """Highest step first, then the lowest rank; what only an older attempt has logged is looked for there."""
        for rank, stream in enumerate(ranks(store, 2)):
            nan = float("nan") if rank == 0 else 9.0
            logged = {
                850: {"validation": 2.5 + rank, "note": nan},
                1000: {"validation": 2.4, "loss": 2.3, "note": 1.0},
                840: {"validation": 7.0, "loss": 4.0},
                870 + rank: {"odd": float(rank)},
                900: {"odd": 5.0},
            }
            for i, (step, held) in enumerate(logged.items()):
                append(store, stream, report(i, step, measured=False, scalars=held))
        later = launch(store, 2, 900, "later")
        found = {"validation": (850, 2.5), "note": (850, "NaN"), "odd": (871, 1.0), "loss": (840, 4.0)}
        assert newest_of(store) == found
        append(store, later, report(0, 900, scalars={"loss": 1.0}))
        if sealed:
            assert seal_all(store) > 0
        assert newest_of(store) == found | {"loss": (900, 1.0)}

    def test_columns_kept_in_memory_are_let_go_when_their_chunk_changes(self, store, reopen, monkeypatch):
        first, second = ranks(store, 2)
        send(store, first, range(1, 65), 0)
        seal_all(store)
        asked = Selection(points=2, extremes_of=("edq_ratio",))
        before = model_points(store, "r1", None, asked)
        assert before.counts.tolist() == [16] * 4
        assert before.totals["lost"].tolist() == [16 * 60.0] * 4
        with monkeypatch.context() as patch:
            patch.setattr(reading, "read_model_data", lambda *_: 1 / 0)
            again = model_points(store, "r1", ["lost"], asked)
        assert again.totals["lost"].tolist() == before.totals["lost"].tolist()
        send(store, second, range(1, 33), 1)
        joined = [*[1.0 * 180] * 32, 16 * 60.0, 16 * 60.0]
        assert model_points(store, "r1", ["lost"], asked).totals["lost"].tolist() == joined
        finish(store)
        after = model_points(store, "r1", None, asked)
        assert after.totals["lost"].tolist() == [16 * 180.0] * 2 + [16 * 60.0] * 2
        assert plain(model_points(reopen(), "r1", None, asked)) == plain(after)

    def test_late_parts_take_no_extremes_from_coarse_points(self, store):
        """A late part may hold few statistics, and stand in the newest chunk, which has no coarse points yet."""
        first, second = ranks(store, 2)
        send(store, first, range(1, 71), 0)
        finish(store)
        few = np.arange(len(STATISTICS))[:, None] < 12
        for step in (3, 5, 6, 20, 66):
            values = np.where(few, block(step, 1), np.nan)
            append(store, second, report(step, step, rank=1, values=values))
        seal_all(store, now=AFTER_SILENCE)
        assert rows(store, schema.report) == 0
        for metric in ("edq_ratio", "grad_norm", "state_decrement_ratio/exp_avg_sq"):
            single = finished(metric, model_points(store, "r1", None, ALL).totals)[:64].reshape(4, 16)
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
        first, second = ranks(store, 2)
        for start in range(0, 64, 8):
            for rank, stream in enumerate((first, second)):
                send(store, stream, range(start + 1, start + 9), rank, start, now=NOW + 2000.0 * start)
                assert seal_all(store) == 1
        points = model_points(store, "r1", ["lost"], Selection(points=1))
        assert points.totals["lost"].tolist() == [16 * 180.0] * 4
        assert points.counts.tolist() == [16] * 4


def newest_of(store):
    return {name: (held.step, held.value) for name, held in store.runs.get("r1").scalars.items()}


class PartsContract:
    """Steps told in several reports, and two processes on one rank: what counts, and when."""

    def part(self, seq, step, column, of):
        values = block(step)
        values[:, [place for place in range(len(LAYERS)) if place != column]] = np.nan
        return msgspec.structs.replace(report(seq, step, values=values), reports_of_step=of)

    @pytest.mark.parametrize("known", [[3, 3, 3], [2, 3, 3]])
    def test_a_step_is_partial_until_all_its_parts_have_come(self, store, stream, reopen, known):
        """Also where the agent learns only while it sends that there will be more."""
        append(store, stream, report(0, 1))
        for seq, of in enumerate(known, 1):
            assert latest_point(store, "r1").step == 1
            append(store, stream, self.part(seq, 2, seq - 1, of))
            points = model_points(store, "r1", ["lost"], ALL)
            assert points.ranks.tolist() == [1, int(seq == 3)]
            assert points.totals["lost"].tolist()[1] == sum(10.0 * (column + 1) for column in range(seq))
        assert latest_point(store, "r1").model["lost"] == 60.0
        assert latest_point(store, "r1").step == latest_point(reopen(), "r1").step == 2

    def test_another_process_of_a_rank_does_not_blank_what_the_rightful_one_holds(self, store):
        """It says that it holds other replicas: what is sealed of the rank is the first one's all the same."""
        first, second = ranks(store, 2, replica=lambda rank: rank)
        send(store, first, range(1, 41), 0)
        seal_all(store)
        register(store, "again", process_id=99, replica=1, world_size=2)
        send(store, second, range(1, 41), 1)
        for _ in range(2):
            assert model_points(store, "r1", ["lost"], ALL).totals["lost"].tolist() == [60.0] * 40
            store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
            seal_all(store)


def ranks_of(store, replicas, *, first=0, ranks=None):
    """Of one run a rank for each replica number given, from rank `first` on, of `ranks` in all."""
    if first == 0:
        store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
        launch(store, 1, 1)
    more = {"world_size": ranks or len(replicas), "statistics": [*STATISTICS, *KEYS]}
    for rank, replica in enumerate(replicas, first):
        register(store, f"s{rank}", rank=rank, replica=replica, **more)


def told(step, checksums, elements=64.0):
    """A report whose layers have these checksums."""
    return with_more(report(step, step, scalars={}), checksums, elements)


def said(store, rank, *reports):
    append(store, store.streams.stream_record(f"s{rank}"), *reports)


def mismatches(store):
    with store.engine.connect() as connection:
        asked = text("SELECT attempt, step, layer, replicas FROM replica_mismatch ORDER BY step, layer")
        return [tuple(row) for row in connection.execute(asked)]


def events(store):
    return [event for event in store.events.read("r1", 0, 1000).events if event.kind == "replica_mismatch"]


class ReplicasContract:
    """Ranks that hold the same weights, until one of them does not."""

    def test_a_replica_that_differs_is_found_before_anything_is_sealed(self, store):
        ranks_of(store, [0, 1, 2])
        for rank in range(3):
            said(store, rank, told(1, GOOD))
        assert not store.sealing.seal("r1", NOW + 5), "too little to be sealed"
        for rank in range(3):
            said(store, rank, told(2, [5.0, 9.0, 7.0] if rank == 1 else GOOD))
        store.sealing.seal("r1", NOW + 6)
        assert mismatches(store) == [(1, 2, 1, "[1]")]
        (event,) = events(store)
        assert (event.time, event.step, event.attempt, event.layers) == (NOW + 6, 2, 1, [LAYERS[1]])
        assert event.text.startswith("replica 1 of attempt 1 held other weights than the rest after step 2 ")
        assert store.sealing.replica_mismatches() == 1

    def test_the_same_layer_is_told_once_and_another_again(self, store):
        ranks_of(store, [0, 1])
        bad = [5.0, 9.0, 7.0]
        for step, checksums in ((1, bad), (2, bad), (3, [5.0, 9.0, 8.0])):
            said(store, 0, told(step, GOOD))
            said(store, 1, told(step, checksums))
            store.sealing.seal("r1", NOW)
            store.sealing.seal("r1", NOW)
        assert [(step, layer) for _, step, layer, _ in mismatches(store)] == [(1, 1), (2, 1), (3, 1), (3, 2)]
        assert [(event.step, event.layers) for event in events(store)] == [(1, [LAYERS[1]]), (3, [LAYERS[2]])]

    def test_shards_of_a_replica_add_up_and_incomplete_ones_are_left_alone(self, store):
        """Two replicas of two shards each; replica 1 is complete at step 1 only."""
        ranks_of(store, [0, 0, 1, 1])
        for step in (1, 2):
            said(store, 0, told(step, [1.0, 2.0, 3.0]))
            said(store, 1, told(step, [4.0, 4.0, 4.0]))
            said(store, 2, told(step, [4.0, 4.0, 4.0]))
        said(store, 3, told(1, [1.0, 2.0, 3.0]))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == []
        said(store, 3, told(2, [1.0, 2.0, 2.0]))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == [(1, 2, 2, "[1]")]

    @pytest.mark.parametrize(
        ("checksums", "elements", "differ"),
        [(GOOD, 64.0, []), ([6.0, 6.0, 7.5], 64.0, [0, 2]), ([1.0, 2.0, 3.0], 32.0, [])],
        ids=["equal", "differences that cancel in no sum", "another sample"],
    )
    def test_which_layers_differ(self, store, checksums, elements, differ):
        """They go with their run."""
        ranks_of(store, [0, 1])
        said(store, 0, *(told(step, GOOD) for step in range(1, 5)))
        said(store, 1, *(told(step, checksums, elements) for step in range(1, 5)))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == [(1, step, layer, "[1]") for step in range(1, 5) for layer in differ]
        assert [event.layers for event in events(store)] == [[LAYERS[layer] for layer in differ]] * bool(differ)
        assert store.sealing.replica_mismatches() == 4 * len(differ)
        store.runs.delete("r1", NOW)
        assert store.sealing.replica_mismatches() == 0

    def test_a_rank_that_comes_later_is_compared_with_what_waits(self, store):
        ranks_of(store, [0, 1])
        said(store, 0, told(1, GOOD), told(2, GOOD))
        store.sealing.seal("r1", NOW)
        said(store, 1, told(1, GOOD))
        store.sealing.seal("r1", NOW)
        said(store, 1, told(2, [5.0, 6.0, 8.0]))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == [(1, 2, 2, "[1]")]

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_rank_still_sending_when_another_ends_the_run_is_compared(self, store, first):
        """The rank that is done first finishes the run for all: what it reported must wait for the others."""
        ranks_of(store, [0, 1])
        said(store, first, *(told(step, GOOD) for step in (1, 2, 3)))
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        assert not store.sealing.seal("r1", NOW)
        said(store, 1 - first, told(1, GOOD), told(2, GOOD))
        assert not store.sealing.seal("r1", NOW)
        said(store, 1 - first, told(3, [5.0, 6.0, 8.0]))
        assert store.sealing.seal("r1", NOW) == 1
        assert mismatches(store) == [(1, 3, 2, "[1]")]

    def test_a_rank_that_registers_after_the_run_has_ended_is_compared(self, store):
        ranks_of(store, [0], ranks=2)
        said(store, 0, told(1, GOOD))
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        assert not store.sealing.seal("r1", NOW)
        ranks_of(store, [1], ranks=2, first=1)
        said(store, 1, told(1, [5.0, 6.0, 8.0]))
        assert store.sealing.seal("r1", NOW) == 1
        assert mismatches(store) == [(1, 1, 2, "[1]")]

    def test_a_rank_that_never_comes_is_not_waited_for_longer_than_a_silent_run(self, store):
        ranks_of(store, [0, 1])
        said(store, 0, told(1, GOOD))
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        assert not store.sealing.seal("r1", NOW + 599)
        assert store.sealing.seal("r1", NOW + 601) == 1
