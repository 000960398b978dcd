"""What every backend must find: ranks that hold the same weights, until one of them does not."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from collage_monitor import wire
from tests.server.samples import LAYERS, STATISTICS, report
from tests.server.store.sending import append, launch, register, with_more
from tests.server.store.stores import NOW

KEYS = ["replica_checksum", "replica_checksum_elements"]


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


GOOD = [5.0, 6.0, 7.0]


class ReplicasContract:
    """Subclasses give the fixture `store` (open, empty)."""

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
