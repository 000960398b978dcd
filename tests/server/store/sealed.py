"""What is read of sealed runs beyond their points: newer servers' rows, labels, scalars. Every backend runs it."""

from __future__ import annotations

import pytest
from collage_server.store import schema
from collage_server.store.reading import logged_scalars
from collage_server.store.reading.run_view import is_known
from collage_server.store.row_helpers import to_json
from sqlalchemy import update

from collage_monitor import metrics, wire
from tests.server.reads import latest_point, layer_points, model_points, scalar_points
from tests.server.samples import STATISTICS, report
from tests.server.store.seen import plain, seen, unchanged
from tests.server.store.sending import append, fill, register, send, with_more
from tests.server.store.stores import ALL, NOW, rows, seal_all


class SealedContract:
    """Subclasses give the fixture `store`, with the contract's small limits."""

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
    def test_the_newest_scalars_are_those_of_the_newest_steps(self, store, late):
        """Late reports become parts behind newer ones; what waits in the journal hides that no less."""
        stream = fill(store)
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

    def test_the_newest_scalars_are_read_from_the_last_parts(self, store, monkeypatch):
        """Of a live run, too, whose newest value is not sealed yet."""
        stream = fill(store)
        send(store, stream, range(1, 101))
        assert seal_all(store) == 3
        known = []
        read = logged_scalars._LoggedReading.points

        def counted(*arguments):
            known.append({run_id: len(held) for run_id, held in arguments[-1].items()})
            return read(*arguments)

        monkeypatch.setattr(logged_scalars._LoggedReading, "points", counted)
        for _ in range(2):
            with store.points.snapshot() as snapshot:
                assert len(snapshot.newest_scalars(["r1"], 10)["r1"]["loss"]) == 10
            store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
            seal_all(store)
        assert known == [{"r1": 4}] * 2
