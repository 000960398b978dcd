"""What sealing must not change: everything that readers see. Every backend runs it."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager, nullcontext

import msgspec
import numpy as np
import pytest
from collage_server.errors import Gone, Unprocessable
from collage_server.store import Selection, schema
from collage_server.store.chunks.blobs import read_layer_data
from collage_server.store.reading import points as reading
from collage_server.store.sealing.seal_plan import SealLimits
from sqlalchemy import func, select

from collage_monitor.statistics import reduce_steps
from tests.server.reads import layer_points, model_points, scalar_points
from tests.server.samples import LAYERS, STATISTICS, block, layer, report
from tests.server.store.laws import killed_after
from tests.server.store.seen import plain, seen, unchanged
from tests.server.store.sending import append, fill, launch, ranks, register, send, with_more
from tests.server.store.stores import ALL, LIMITS, NOW, rows, seal_all
from tests.waiting import beside

CHUNKS = (schema.point_chunk, schema.model_chunk, schema.layer_chunk, schema.scalar_chunk, schema.entry)


class SealingContract:
    """Subclasses give the fixtures `store` and `reopen`, with the contract's small limits."""

    def test_a_run_that_begins_at_step_0_is_sealed_to_an_empty_journal(self, store):
        """Nothing before a chunk is full, and nothing of other runs."""
        fill(store, "r0", "s00")
        stream, other = fill(store), fill(store, "r2", "s2")
        send(store, stream, range(31))
        assert store.journal.runs() == ["r1"]
        assert (seal_all(store), rows(store, schema.report)) == (0, 31)
        send(store, stream, range(31, 64), first_seq=31)
        send(store, other, range(1, 41))
        before, of_other = seen(store), seen(store, "r2")
        assert seal_all(store) == 2
        assert store.journal.runs() == ["r2"]
        assert rows(store, schema.report) == 40
        unchanged(before, seen(store))
        unchanged(of_other, seen(store, "r2"))
        assert seal_all(store, "r2") == 1
        unchanged(of_other, seen(store, "r2"))

    def test_sealed_reports_that_are_sent_again_change_nothing(self, store):
        stream = fill(store)
        firsts = range(0, 96, 32)
        for first in firsts:
            send(store, stream, range(first, first + 32), first_seq=first)
            assert seal_all(store) == 1
        before = seen(store)
        for first in firsts:
            again = send(store, stream, range(first, first + 32), first_seq=first)
            assert (again.accepted, again.duplicates) == (0, 32)
        assert seal_all(store) == 0
        unchanged(before, seen(store))

    def test_a_run_without_layers_has_whole_chunks_and_no_rows_of_layers(self, store, monkeypatch):
        """What is small waits for the whole chunk, which then is one commit, and one that empties the journal."""
        store.sealing.limits = SealLimits()
        stream = fill(store)
        sums = np.random.default_rng(1).lognormal(size=(512, len(STATISTICS)))
        sums[:, ::3] = 100.0
        reports = [
            msgspec.structs.replace(report(i, i + 1), layer_count=0, statistics=b"", model=values.tobytes())
            for i, values in enumerate(sums)
        ]
        append(store, stream, *reports[:255])
        assert seal_all(store) == 0, "not yet whole"
        append(store, stream, *reports[255:])
        commits = []
        writing = store.writing_claimed

        def counted():
            commits.append(1)
            return writing()

        monkeypatch.setattr(store, "writing_claimed", counted)
        before = model_points(store, "r1", STATISTICS, ALL)
        assert seal_all(store) == 2
        assert len(commits) == 4
        assert [rows(store, table) for table in (schema.layer_chunk, schema.report)] == [0, 0]
        unchanged(plain(before), plain(model_points(store, "r1", STATISTICS, ALL)))
        with store.reading() as connection:
            stored = sum(
                connection.execute(select(func.sum(func.length(column)))).scalar_one()
                for column in (schema.model_chunk.c.data, schema.point_chunk.c.points)
            )
        assert stored <= 8 * sums.size, "all levels and points, in what the totals of single steps would take"

    def test_labels_are_as_long_as_what_is_sealed_under_them_may_be(self, store):
        fill(store)
        for length, refused in ((448, False), (449, True)):
            keys = [f"state_decrement_{kind}_sum/".ljust(length, "x") for kind in ("observed", "intended")]
            with pytest.raises(Unprocessable, match="448") if refused else nullcontext():
                register(store, f"s{length}", statistics=[*STATISTICS, *keys])
        reports = [with_more(report(i, i + 1), -1.0, -1.0) for i in range(32)]
        append(store, store.streams.stream_record("s448"), *reports)
        assert seal_all(store) == 1

    def test_coarse_levels_are_made_of_some_layers_at_a_time(self, store, monkeypatch):
        """A chunk of 45,000 layers would take gigabytes at once; the last layer came late, and so did a rank."""
        held = []

        def counted(*arguments, **more):
            held.append(read_layer_data(*arguments, **more))
            return held[-1]

        monkeypatch.setattr(reading, "read_layer_data", counted)
        seen, most = [], []
        for run_id, coarse_bytes in (("r1", LIMITS.coarse_bytes), ("r2", 1)):
            store.sealing.limits = dataclasses.replace(LIMITS, part_points=8, coarse_bytes=coarse_bytes)
            stream = fill(store, run_id, f"{run_id}-s")
            send(store, stream, range(1, 17))
            seal_all(store, run_id)
            stream = register(store, f"{run_id}-s", run_id, layers=[*map(layer, [*LAYERS, "head"])])
            wide = [report(i, i + 1, values=block(i + 1, layers=4)) for i in range(16, 32)]
            held.clear()
            append(store, stream, *wide)
            seal_all(store, run_id)
            most.append(max(values.shape[2] for values in held))
            coarse = Selection(points=1, extremes_of=("edq_ratio",))
            found = layer_points(store, run_id, STATISTICS, coarse)
            seen.append((plain(found), repr(found.extremes), found.layers))
        assert most == [4, 1]
        assert seen[0] == seen[1]
        assert seen[0][0]["counts"] == [16, 16]

    def test_a_metric_without_kept_extremes_is_read_fine(self, store):
        send(store, fill(store), range(1, 65))
        seal_all(store)
        points = layer_points(store, "r1", STATISTICS, Selection(points=2, extremes_of=("edq_cosine",)))
        assert points.counts.tolist() == [1] * 64, "the model keeps its extremes, layers do not"
        points = layer_points(store, "r1", STATISTICS, Selection(points=2, extremes_of=("edq_ratio",)))
        assert points.counts.tolist() == [16] * 4

    def test_an_older_attempt_is_sealed_to_its_end(self, store):
        send(store, fill(store), range(1, 6))
        send(store, launch(store, 2, 6, "s1"), range(6, 10))
        before = seen(store)
        assert seal_all(store) == 1
        assert rows(store, schema.report) == 4
        unchanged(before, seen(store))

    def test_layers_and_statistics_added_during_the_run(self, store):
        stream = fill(store)
        send(store, stream, range(1, 41))
        seal_all(store)
        names = [*LAYERS, "head.weight"]
        stream = register(store, "s0", layers=[*map(layer, names)], statistics=[*STATISTICS, "stray"])
        later = (with_more(report(i, i, values=block(1, layers=4)), 7.0) for i in range(40, 69))
        append(store, stream, *later)
        before = seen(store)
        assert seal_all(store) == 1
        unchanged(before, seen(store))
        points = layer_points(store, "r1", ["stray", "lost"], ALL)
        assert points.layers == names
        assert np.isnan(points.totals["stray"][:39]).all()
        assert points.totals["stray"][-1].tolist() == [7.0] * 4
        assert str(points.totals["lost"][[0, -1]].tolist()) == "[[10.0, 20.0, 30.0, nan], [10.0, 20.0, 30.0, 40.0]]"

    def test_no_transaction_writes_more_blocks_than_a_slice_has(self, store):
        """Coarse levels, too: acknowledgements wait for none of them."""
        send(store, fill(store), range(1, 65))
        tables = (schema.layer_chunk, schema.model_chunk)
        counts = [select(func.count()).select_from(table) for table in tables]
        writing, written = store.writing, []

        @contextmanager
        def counted():
            with writing() as connection:
                before = sum(connection.execute(count).scalar_one() for count in counts)
                yield connection
                written.append(sum(connection.execute(count).scalar_one() for count in counts) - before)

        store.writing = counted
        assert seal_all(store) == 2
        assert max(written) == LIMITS.slice_rows
        assert sum(written) == sum(rows(store, table) for table in tables)

    def test_reports_arriving_while_a_part_is_built_are_kept(self, store):
        stream = fill(store)
        send(store, stream, range(1, 33))
        writing = store.writing
        sent: list[bool] = []

        @contextmanager
        def interleaved():
            if not sent:
                sent.append(True)
                append(store, stream, report(32, 20, measured=False, scalars={"extra": 1.0}), report(33, 33))
            with writing() as connection:
                yield connection

        store.writing = interleaved
        try:
            assert store.sealing.seal("r1", NOW)
        finally:
            store.writing = writing
        assert store.streams.of_run("r1")[0].reports == 34
        assert model_points(store, "r1", ["lost"], ALL).steps.tolist() == list(range(1, 34))
        assert scalar_points(store, "r1", ("extra",), ALL)["extra"].steps.tolist() == [20]
        assert rows(store, schema.report) == 2

    def test_a_run_deleted_while_it_is_sealed_leaves_no_chunks(self, store):
        stream = fill(store)
        send(store, stream, range(1, 41))
        writing, calls = store.writing, []

        @contextmanager
        def deleting():
            calls.append(True)
            if len(calls) == 3:
                store.writing = writing
                store.runs.delete("r1", NOW)
            with writing() as connection:
                yield connection

        store.writing = deleting
        with pytest.raises(Gone):
            store.sealing.seal("r1", NOW)
        store.writing = writing
        assert not any(rows(store, table) for table in CHUNKS)

    def test_concurrent_readers_see_the_same_throughout(self, store):
        """Readers in a thread of their own while parts are made: always all points, each once."""
        send(store, fill(store), range(1, 65))
        found = []
        with beside(lambda: found.append(model_points(store, "r1", ["lost"], ALL).steps.tolist())):
            seal_all(store)
        assert all(steps == list(range(1, 65)) for steps in found)


class KilledContract:
    """Sealing that ends after each transaction: by day on SQLite, by night wherever the store is."""

    def test_what_a_killed_server_has_sealed_leaves_the_journal(self, store):
        """Wherever it is killed, among the deletions of a sealed part's reports, too; what is not due stays."""
        for number in range(100):
            run_id = f"r{number}"
            send(store, fill(store, run_id, f"s{number}"), range(40))
            sealed = sealed_until(store, 3 * number, run_id)
            seal_all(store, run_id)
            assert rows(store, schema.report) == 8 * (number + 1)
            if sealed is not None:
                break
        assert sealed == 1
        assert number > 5

    def test_coarse_levels_made_anew_are_seen_whole_or_not_at_all(self, store):
        """A late rank changes a chunk; stopped after any transaction, every coarse answer has the same sums."""
        first, second = ranks(store, 2)
        send(store, first, range(1, 65))
        seal_all(store)
        send(store, second, range(1, 65), 1)
        for allowed in range(200):
            sealed = sealed_until(store, allowed)
            for points in (2, 64):
                model = model_points(store, "r1", ["lost"], Selection(points=points))
                assert reduce_steps(model.totals)["lost"] == 64 * 180.0
                layers = layer_points(store, "r1", ["lost"], Selection(points=points))
                assert reduce_steps(layers.totals)["lost"].tolist() == [64 * 30.0, 64 * 60.0, 64 * 90.0]
            if sealed == 0:
                break
        assert model_points(store, "r1", ["lost"], Selection(points=2)).counts.tolist() == [16] * 4
        assert allowed > 20
        with store.engine.connect() as connection:
            coarse = select(schema.layer_chunk.c.level, schema.layer_chunk.c.chunk, schema.layer_chunk.c.part)
            held = connection.execute(coarse.where(schema.layer_chunk.c.level > 1).distinct()).all()
        assert sorted(map(tuple, held)) == [(level, chunk, 1) for level in (16, 256) for chunk in (0, 1)]


def sealed_until(store, allowed, run_id="r1"):
    """How many parts a process seals that is killed after so many transactions; None: it was killed."""
    sealed: list[int] = []
    with killed_after(store, allowed):
        sealed.append(store.sealing.seal(run_id, NOW))
    return sealed[0] if sealed else None
