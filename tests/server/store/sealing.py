"""What sealing must not change: everything that readers see, of newer servers' rows, too. Every backend runs it."""

import dataclasses
from contextlib import contextmanager, nullcontext
from itertools import count
from unittest import mock

import numpy as np
import pytest
from collage_server.errors import Gone, Unprocessable
from collage_server.store import Selection, schema
from collage_server.store.chunks.blobs import read_layer_data
from collage_server.store.reading import logged_scalars
from collage_server.store.reading import points as reading
from collage_server.store.reading.run_view import is_known
from collage_server.store.row_helpers import to_json
from collage_server.store.sealing.seal_plan import SealLimits
from msgspec.structs import replace
from sqlalchemy import func, select, update

from collage_monitor import metrics, wire
from collage_monitor.statistics import reduce_steps
from tests.server.reads import latest_point, layer_points, model_points, scalar_points
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

    def test_sealed_reports_that_are_sent_again_change_nothing(self, store, stream):
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

    def test_a_run_without_layers_has_whole_chunks_and_no_rows_of_layers(self, store):
        """What is small waits for the whole chunk, which then is one commit, and one that empties the journal."""
        store.sealing.limits = SealLimits()
        stream = fill(store)
        sums = np.random.default_rng(1).lognormal(size=(512, len(STATISTICS)))
        sums[:, ::3] = 100.0
        whole = {"layer_count": 0, "statistics": b""}
        reports = [replace(report(i, i + 1), model=values.tobytes(), **whole) for i, values in enumerate(sums)]
        append(store, stream, *reports[:255])
        assert seal_all(store) == 0, "not yet whole"
        append(store, stream, *reports[255:])
        before = model_points(store, "r1", STATISTICS, ALL)
        with mock.patch.object(store, "writing_claimed", wraps=store.writing_claimed) as writing:
            assert seal_all(store) == 2
        assert writing.call_count == 4
        assert [rows(store, table) for table in (schema.layer_chunk, schema.report)] == [0, 0]
        unchanged(plain(before), plain(model_points(store, "r1", STATISTICS, ALL)))
        columns = (schema.model_chunk.c.data, schema.point_chunk.c.points)
        with store.reading() as connection:
            sizes = [connection.execute(select(func.sum(func.length(column)))).scalar_one() for column in columns]
        assert sum(sizes) <= 8 * sums.size, "all levels and points, in what the totals of single steps would take"

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

    def test_layers_and_statistics_added_during_the_run(self, store, stream):
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
        writing, held = store.writing, [0]

        @contextmanager
        def counted():
            with writing() as connection:
                yield connection
            held.append(rows(store, schema.layer_chunk) + rows(store, schema.model_chunk))

        with mock.patch.object(store, "writing", counted):
            assert seal_all(store) == 2
        assert max(np.diff(held)) == LIMITS.slice_rows

    def test_reports_arriving_while_a_part_is_built_are_kept(self, store, stream):
        send(store, stream, range(1, 33))
        writing, calls = store.writing, count()

        @contextmanager
        def interleaved():
            if next(calls) == 0:
                append(store, stream, report(32, 20, measured=False, scalars={"extra": 1.0}), report(33, 33))
            with writing() as connection:
                yield connection

        with mock.patch.object(store, "writing", interleaved):
            assert store.sealing.seal("r1", NOW)
        assert store.streams.of_run("r1")[0].reports == 34
        assert model_points(store, "r1", ["lost"], ALL).steps.tolist() == list(range(1, 34))
        assert scalar_points(store, "r1", ("extra",), ALL)["extra"].steps.tolist() == [20]
        assert rows(store, schema.report) == 2

    def test_a_run_deleted_while_it_is_sealed_leaves_no_chunks(self, store, stream):
        send(store, stream, range(1, 41))
        writing, calls = store.writing, count(1)

        @contextmanager
        def deleting():
            if next(calls) == 3:
                store.runs.delete("r1", NOW)
            with writing() as connection:
                yield connection

        with mock.patch.object(store, "writing", deleting), pytest.raises(Gone):
            store.sealing.seal("r1", NOW)
        assert not any(rows(store, table) for table in CHUNKS)

    def test_readers_see_whole_commits_each_point_once_while_parts_are_made(self, store, stream):
        found = []
        with beside(lambda: found.append(model_points(store, "r1", ["lost"], ALL).steps.tolist())):
            for first in range(1, 101, 5):
                send(store, stream, range(first, first + 5), first_seq=first)
                store.sealing.seal("r1", NOW)
        assert all(steps == list(range(1, len(steps) + 1)) and len(steps) % 5 == 0 for steps in found)
        assert store.streams.of_run("r1")[0].reports == 100


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


class SealedContract:
    """What is read of sealed runs beyond their points: newer servers' rows, labels, scalars."""

    def test_a_run_of_a_newer_server_is_answered_and_left_to_it(self, store, monkeypatch):
        """While a cluster is upgraded: statistics that this catalogue lacks, in the journal and in chunks."""
        reports = [with_more(report(i, 10 * (i + 1)), 7.0) for i in range(80)]
        with monkeypatch.context() as upgraded:
            upgraded.setitem(metrics.STATISTICS, "future_sum", metrics.STATISTICS["parameter_squared_sum"])
            is_known.cache_clear()
            fill(store)
            stream = register(store, "s0", statistics=[*STATISTICS, "future_sum"])
            append(store, stream, *reports[:40])
            assert seal_all(store) == 1
            append(store, stream, *reports[40:])
            whole = plain(model_points(store, "r1", None, ALL))
            layers = plain(layer_points(store, "r1", STATISTICS, ALL))
        is_known.cache_clear()
        assert "future_sum" in whole
        known = {key: held for key, held in whole.items() if key != "future_sum"}
        assert plain(model_points(store, "r1", None, ALL)) == known
        assert plain(layer_points(store, "r1", STATISTICS, ALL)) == layers
        assert "future_sum" not in latest_point(store, "r1").model
        assert seal_all(store) == 0
        assert rows(store, schema.report) == 48

    def test_a_label_with_a_line_break_that_an_older_server_took_is_read(self, store):
        """A label may hold any separator, so none stands between what is read of the dictionary."""
        fill(store)
        keys = [*STATISTICS, "state_zero/exp\n7 avg"]
        with store.engine.begin() as connection:
            connection.execute(update(schema.stream).values(statistics=to_json(keys), checks=None))
        stream = store.streams.stream_record("s0")
        reports = [with_more(report(i, i + 1), 7.0) for i in range(64)]
        append(store, stream, *reports[:32])
        before = plain(model_points(store, "r1", None, ALL))
        assert seal_all(store) == 1
        assert plain(model_points(store, "r1", None, ALL)) == before
        append(store, stream, *reports[32:])
        assert seal_all(store) == 1
        assert model_points(store, "r1", [keys[-1]], ALL).totals[keys[-1]].tolist() == [21.0] * 64
        assert keys[-1] in latest_point(store, "r1").model

    def test_scalars_between_measured_steps_and_beyond(self, store):
        logged = {i: {"loss": float(i)} for i in range(80)}
        logged |= {10: {"loss": float("nan")}, 11: {"loss": float("-inf"), "note": 1.0}}
        reports = [report(i, i + 1, measured=i % 2 == 0, scalars=held) for i, held in logged.items()]
        append(store, fill(store), *reports)
        before = seen(store)
        assert seal_all(store) == 1
        unchanged(before, seen(store))
        with store.points.snapshot() as snapshot:
            newest = snapshot.newest_scalars(["r1"], 20)["r1"]
        assert newest["loss"].tolist() == [float(i) for i in range(60, 80)]
        assert newest["note"].tolist() == [1.0]

    @pytest.mark.parametrize("late", [0, 20, 40])
    def test_the_newest_scalars_are_those_of_the_newest_steps(self, store, stream, late):
        """Late reports become parts behind newer ones; what waits in the journal hides that no less."""
        send(store, stream, range(101, 101 + 96), first_seq=100)
        seal_all(store)
        for start in range(0, late, 20):
            send(store, stream, range(start + 1, start + 21), first_seq=start)
            seal_all(store)
        for more in range(2):
            if more:
                send(store, stream, [197], first_seq=196)
            logged = scalar_points(store, "r1", ["loss"], ALL)["loss"].values
            with store.points.snapshot() as snapshot:
                newest = snapshot.newest_scalars(["r1"], 10)["r1"]["loss"]
            assert newest[-10:].tolist() == logged[-10:].tolist()

    def test_the_newest_scalars_are_read_from_the_last_parts(self, store, stream, monkeypatch):
        """Of a live run, too, whose newest value is not sealed yet."""
        send(store, stream, range(1, 101))
        assert seal_all(store) == 3
        logged = logged_scalars._LoggedReading
        read = mock.Mock(side_effect=logged.points)
        monkeypatch.setattr(logged, "points", lambda *arguments: read(*arguments))
        for _ in range(2):
            with store.points.snapshot() as snapshot:
                assert len(snapshot.newest_scalars(["r1"], 10)["r1"]["loss"]) == 10
            store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
            seal_all(store)
        parts = [{run_id: len(held) for run_id, held in call.args[-1].items()} for call in read.call_args_list]
        assert parts == [{"r1": 4}] * 2
