"""What every backend must find: ranks that hold the same weights, until one of them does not."""

from __future__ import annotations

import numpy as np
import pytest
from collage_server.store import ReportGroup
from sqlalchemy import text

from collage_monitor import wire
from tests.server.samples import LAYERS, STATISTICS, block, layer, model_of, stream_create
from tests.server.store.contract import NOW

KEYS = ["replica_checksum", "replica_checksum_elements"]


def register(store, replicas, *, first=0, ranks=None):
    """Of one run a rank for each replica number given, from rank `first` on, of `ranks` in all."""
    if first == 0:
        store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
        store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=1), NOW)
    for rank, replica in enumerate(replicas, first):
        create = stream_create(
            f"s{rank}",
            rank=rank,
            world_size=ranks or len(replicas),
            layers=[layer(name, replica) for name in LAYERS],
            statistics=[*STATISTICS, *KEYS],
        )
        store.streams.create_stream("r1", create, NOW)


def told(step, checksums, elements=64.0, seq=None):
    """A report whose layers have these checksums."""
    values = np.concatenate([block(step), [checksums], np.full((1, 3), elements)])
    return wire.Report(
        seq=step if seq is None else seq,
        step=step,
        time=NOW + step,
        statistic_count=len(values),
        layer_count=3,
        statistics=wire.array_to_bytes(values),
        model=wire.array_to_bytes(np.append(model_of(values[:-2]), np.nansum(values[-2:], axis=1))),
    )


def send(store, rank, *reports):
    store.journal.append([ReportGroup(store.streams.stream_record(f"s{rank}"), list(reports))], NOW)


def mismatches(store):
    with store.engine.connect() as connection:
        rows = connection.execute(
            text("SELECT attempt, step, layer, replicas FROM replica_mismatch ORDER BY step, layer")
        )
        return [tuple(row) for row in rows]


def events(store):
    return [event for event in store.events.read("r1", 0, 1000).events if event.kind == "replica_mismatch"]


GOOD = [5.0, 6.0, 7.0]


class ReplicasContract:
    """Subclasses give the fixture `store` (open, empty)."""

    def test_equal_replicas_are_silent(self, store):
        register(store, [0, 1])
        for rank in range(2):
            send(store, rank, *(told(step, GOOD) for step in range(1, 5)))
        store.sealing.seal("r1", NOW)
        assert (mismatches(store), events(store), store.sealing.replica_mismatches()) == ([], [], 0)

    def test_a_replica_that_differs_is_found_before_anything_is_sealed(self, store):
        register(store, [0, 1, 2])
        for rank in range(3):
            send(store, rank, told(1, GOOD))
        assert not store.sealing.seal("r1", NOW + 5), "too little to be sealed"
        for rank in range(3):
            send(store, rank, told(2, [5.0, 9.0, 7.0] if rank == 1 else GOOD))
        store.sealing.seal("r1", NOW + 6)
        assert mismatches(store) == [(1, 2, 1, "[1]")]
        (event,) = events(store)
        assert (event.time, event.step, event.attempt, event.layers) == (NOW + 6, 2, 1, [LAYERS[1]])
        assert (
            event.text == "replica 1 of attempt 1 held other weights than the rest after step 2 in blocks.0.weight"
        )
        assert store.sealing.replica_mismatches() == 1

    def test_the_same_layer_is_told_once_and_another_again(self, store):
        register(store, [0, 1])
        bad = [5.0, 9.0, 7.0]
        for step, checksums in ((1, bad), (2, bad), (3, [5.0, 9.0, 8.0])):
            send(store, 0, told(step, GOOD))
            send(store, 1, told(step, checksums))
            store.sealing.seal("r1", NOW)
            store.sealing.seal("r1", NOW)
        assert [(step, layer) for _, step, layer, _ in mismatches(store)] == [(1, 1), (2, 1), (3, 1), (3, 2)]
        assert [(event.step, event.layers) for event in events(store)] == [(1, [LAYERS[1]]), (3, [LAYERS[2]])]

    def test_layers_that_cancel_in_no_sum_are_both_named(self, store):
        register(store, [0, 1])
        send(store, 0, told(1, GOOD))
        send(store, 1, told(1, [6.0, 6.0, 7.5]))
        store.sealing.seal("r1", NOW)
        assert events(store)[0].layers == [LAYERS[0], LAYERS[2]]

    def test_another_sample_says_nothing(self, store):
        register(store, [0, 1])
        send(store, 0, told(1, GOOD))
        send(store, 1, told(1, [1.0, 2.0, 3.0], elements=32.0))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == []

    def test_shards_of_a_replica_add_up_and_incomplete_ones_are_left_alone(self, store):
        """Two replicas of two shards each; replica 1 is complete at step 1 only."""
        register(store, [0, 0, 1, 1])
        for step in (1, 2):
            send(store, 0, told(step, [1.0, 2.0, 3.0]))
            send(store, 1, told(step, [4.0, 4.0, 4.0]))
            send(store, 2, told(step, [4.0, 4.0, 4.0]))
        send(store, 3, told(1, [1.0, 2.0, 3.0]))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == []
        send(store, 3, told(2, [1.0, 2.0, 2.0]))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == [(1, 2, 2, "[1]")]

    def test_a_rank_that_comes_later_is_compared_with_what_waits(self, store):
        register(store, [0, 1])
        send(store, 0, told(1, GOOD), told(2, GOOD))
        store.sealing.seal("r1", NOW)
        send(store, 1, told(1, GOOD))
        store.sealing.seal("r1", NOW)
        send(store, 1, told(2, [5.0, 6.0, 8.0]))
        store.sealing.seal("r1", NOW)
        assert mismatches(store) == [(1, 2, 2, "[1]")]

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_rank_still_sending_when_another_ends_the_run_is_compared(self, store, first):
        """The rank that is done first finishes the run for all: what it reported must wait for the others."""
        register(store, [0, 1])
        send(store, first, *(told(step, GOOD) for step in (1, 2, 3)))
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        assert not store.sealing.seal("r1", NOW)
        send(store, 1 - first, told(1, GOOD), told(2, GOOD))
        assert not store.sealing.seal("r1", NOW)
        send(store, 1 - first, told(3, [5.0, 6.0, 8.0]))
        assert store.sealing.seal("r1", NOW) == 1
        assert mismatches(store) == [(1, 3, 2, "[1]")]

    def test_a_rank_that_registers_after_the_run_has_ended_is_compared(self, store):
        register(store, [0], ranks=2)
        send(store, 0, told(1, GOOD))
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        assert not store.sealing.seal("r1", NOW)
        register(store, [1], ranks=2, first=1)
        send(store, 1, told(1, [5.0, 6.0, 8.0]))
        assert store.sealing.seal("r1", NOW) == 1
        assert mismatches(store) == [(1, 1, 2, "[1]")]

    def test_a_rank_that_never_comes_is_not_waited_for_longer_than_a_silent_run(self, store):
        register(store, [0, 1])
        send(store, 0, told(1, GOOD))
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        assert not store.sealing.seal("r1", NOW + 599)
        assert store.sealing.seal("r1", NOW + 601) == 1

    def test_a_deleted_run_takes_its_findings_along(self, store):
        register(store, [0, 1])
        send(store, 0, told(1, GOOD))
        send(store, 1, told(1, [1.0, 2.0, 3.0]))
        store.sealing.seal("r1", NOW)
        assert store.sealing.replica_mismatches() == 3
        store.runs.delete("r1", NOW)
        assert store.sealing.replica_mismatches() == 0
