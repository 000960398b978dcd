"""What every backend must do: a backend's test file only names the backend."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from collage_server.errors import Conflict, Damaged, Gone, NotFound, Unprocessable
from collage_server.store import READERS, GroupQuery, NewEvent, ReportGroup, RunQuery, Selection, TableQuery, schema
from collage_server.store.journal import stream_store
from collage_server.store.records import CONNECTIONS, stream_record
from collage_server.summariser import keep_overview
from sqlalchemy import select, update

from collage_monitor import metrics, wire
from tests.server.reads import due_runs, evaluate_due, latest_point, layer_points, model_points, scalar_points
from tests.server.samples import LAYERS, STATISTICS, layer, report, stream_create, watch
from tests.server.store.sending import append, fill, launch, register, with_more
from tests.server.store.stores import ALL, LIMITS, NOW, purge_all, rows

__all__ = ["LIMITS", "NOW", "StoreContract"]


class StoreContract:
    """Subclasses give the fixtures `store` (open, empty) and `reopen` (closes it and opens the same data anew)."""

    def test_reports_in_any_order_are_stored_once_and_the_first_of_a_number_stays(self, store, stream):
        for commit, expected in (
            ([[4]], [(1, 0)]),
            ([[0, 1]], [(2, 0)]),
            ([[1, 2]], [(1, 1)]),
            ([[3, 3], [3]], [(1, 1), (0, 1)]),
        ):
            groups = [ReportGroup(stream, [report(seq, 10 + 10 * seq) for seq in seqs]) for seqs in commit]
            outcomes = store.journal.append(groups, NOW)
            assert [(outcome.accepted, outcome.duplicates) for outcome in outcomes] == expected
        append(store, stream, report(4, 50, scalars={"loss": 99.0}))
        [known] = store.streams.of_run("r1")
        assert (known.reports, known.last_seq, known.last_step) == (5, 4, 50)
        assert model_points(store, "r1", None, ALL).steps.tolist() == [10, 20, 30, 40, 50]
        assert latest_point(store, "r1").step == 50
        assert scalar_points(store, "r1", None, ALL)["loss"].values.tolist() == [3.9, 3.8, 3.7, 3.6, 3.5]
        run = store.runs.get("r1")
        assert run.scalars["loss"] == wire.LoggedScalar(step=50, value=3.5)
        assert (run.first_step, run.first_time) == (10, NOW + 10)

    def test_as_many_readers_as_may_be_keep_no_report_waiting(self, store, stream):
        with contextlib.ExitStack() as readers, ThreadPoolExecutor(1) as writer:
            for _ in range(READERS):
                readers.enter_context(store.reading())
            stored = writer.submit(append, store, stream, report(0, 10))
            with contextlib.ExitStack() as others:
                for _ in range(CONNECTIONS - READERS - 1):
                    others.enter_context(store.reading())
                assert stored.result(10).accepted == 1

    def test_the_newest_value_is_the_last_one_of_the_highest_step(self, store, stream):
        for commit, newest in (
            ({0: 10, 1: 10}, 1),
            ({2: 10}, 2),
            ({3: 10}, 3),
            ({4: 20, 5: 10}, 4),
        ):
            append(store, stream, *(report(seq, step, scalars={"loss": seq}) for seq, step in commit.items()))
            assert store.runs.get("r1").scalars["loss"] == wire.LoggedScalar(step=commit[newest], value=newest)

    def test_selection_by_step(self, store, stream):
        append(store, stream, *(report(i, 10 * i) for i in range(1, 6)))
        chosen = Selection(first_step=20, last_step=40)
        assert model_points(store, "r1", ("lost",), chosen).steps.tolist() == [20, 30, 40]
        assert list(model_points(store, "r1", ("lost",), chosen).totals) == ["lost"]
        assert layer_points(store, "r1", ("lost",), chosen, [LAYERS[1]]).totals["lost"].tolist() == [[20.0]] * 3
        assert scalar_points(store, "r1", ("loss",), chosen)["loss"].steps.tolist() == [20, 30, 40]

    def test_unknown_ids(self, store):
        fill(store)
        for call in (
            lambda: store.runs.get("zz"),
            lambda: store.streams.of_run("zz"),
            lambda: store.streams.layers("zz"),
            lambda: store.streams.stream_record("zz"),
            lambda: model_points(store, "zz", None, ALL),
            lambda: scalar_points(store, "zz", None, ALL),
            lambda: latest_point(store, "zz"),
            lambda: store.events.add("zz", [], NOW),
            lambda: store.runs.delete("zz", NOW),
            lambda: store.runs.update("zz", wire.RunUpdate(), NOW),
            lambda: launch(store, 1, 0, run_id="zz"),
            lambda: store.streams.create_stream("zz", stream_create(), NOW),
            lambda: layer_points(store, "r1", ("lost",), ALL, ["zz"]),
            lambda: model_points(store, "r1", None, Selection(rank=7)),
        ):
            with pytest.raises(NotFound):
                call()

    def test_a_run_is_resumed_by_a_launch_that_is_new(self, store):
        """A rank that is late registers after the others have finished."""
        first, is_new = store.runs.create("p", wire.RunCreate(run_id="r1", name="a", tags=["x"], seed=7), NOW)
        assert is_new
        assert (first.name, first.tags, first.seed, first.state) == ("a", ["x"], 7, "running")
        launch(store, 1, 0)
        store.runs.update("r1", wire.RunUpdate(state="failed"), NOW)
        again, is_new = store.runs.create("p", wire.RunCreate(run_id="r1", config={"lr": 0.1}), NOW + 5)
        assert not is_new
        assert (again.name, again.tags, again.seed, again.state) == ("a", ["x"], 7, "failed")
        assert (again.config, again.created_at, again.updated_at) == ({"lr": 0.1}, NOW, NOW + 5)
        for number, role, state in ((1, None, "failed"), (2, "evaluator", "failed"), (3, None, "running")):
            create = wire.AttemptCreate(launch_id=f"launch-{number}", first_step=0, role=role)
            store.streams.create_attempt("r1", create, NOW + 6)
            assert store.runs.get("r1").state == state, number

    def test_resume_must_and_never_and_in_another_project(self, store):
        def create(project="p", **more):
            return store.runs.create(project, wire.RunCreate(run_id="r1", **more), NOW)

        with pytest.raises(NotFound):
            create(resume="must")
        create(resume="never")
        assert not create(resume="never")[1], "the same message sent twice, before any launch, is no harm"
        launch(store, 1, 0)
        for project, more in (("p", {"resume": "never"}), ("q", {})):
            with pytest.raises(Conflict):
                create(project, **more)

    def test_a_deleted_run_is_gone_for_good(self, store):
        stream, kept = fill(store), fill(store, "r2", "s1")
        append(store, stream, report(0, 10))
        assert latest_point(store, "r1").step == 10
        store.runs.delete("r1", NOW)
        for call in (
            lambda: store.runs.get("r1"),
            lambda: latest_point(store, "r1"),
            lambda: model_points(store, "r1", None, ALL),
            lambda: store.streams.stream_record("s0"),
            lambda: store.events.read("r1", 0, 10),
            lambda: store.events.add("r1", [NewEvent(origin="o", kind="alert", text="t")], NOW),
            lambda: store.runs.delete("r1", NOW),
            lambda: store.runs.create("p", wire.RunCreate(run_id="r1"), NOW),
        ):
            with pytest.raises(Gone):
                call()
        groups = [ReportGroup(stream, [report(1, 20)]), ReportGroup(kept, [report(0, 10)])]
        outcomes = [(told.gone, told.accepted, told.duplicates) for told in store.journal.append(groups, NOW)]
        assert outcomes == [(True, 0, 0), (False, 1, 0)]
        assert listed(store) == ["r2"]

    def test_a_deletion_can_be_undone_until_its_time_is_over(self, store, stream):
        """What was accepted before is there again, and a duplicate if it is sent again; what came meanwhile was
        refused, and may be sent again."""
        create = wire.RunCreate(run_id="r1", tags=["kept"], notes="of ours", config={"lr": 0.1})
        store.runs.create("p", create, NOW + 1)
        append(store, stream, report(0, 10), report(1, 20))
        before, points = store.runs.get("r1"), model_points(store, "r1", None, ALL)
        store.runs.delete("r1", NOW + 2, undo_seconds=60.0)
        with pytest.raises(Gone):
            store.runs.create("p", wire.RunCreate(run_id="r1"), NOW + 3)
        assert append(store, stream, report(2, 30)).gone
        assert listed(store) == []
        store.runs.end_undo(NOW + 61)
        assert not store.retention.purge(9), "nothing goes meanwhile"
        for moment in (61, 62):
            found = store.runs.restore("r1", NOW + moment)
            # Kept answers are out of date; a second time changes nothing.
            assert found == msgspec.structs.replace(before, changed_at=NOW + 61)
        np.testing.assert_equal(vars(store.streams.stream_record("s0")), vars(stream))
        again = model_points(store, "r1", None, ALL)
        assert again.steps.tolist() == points.steps.tolist() == [10, 20]
        outcome = append(store, stream, report(1, 20), report(2, 30))
        assert (outcome.gone, outcome.accepted, outcome.duplicates) == (False, 1, 1)

    @pytest.mark.parametrize("ended", [False, True])
    def test_a_deletion_whose_time_is_over_is_for_good(self, store, stream, ended):
        append(store, stream, report(0, 10))
        store.runs.delete("r1", NOW, undo_seconds=60.0)
        if ended:
            store.runs.end_undo(NOW + 60)
        with pytest.raises(Gone, match="'r1' was deleted for good"):
            store.runs.restore("r1", NOW + 60)
        store.runs.end_undo(NOW + 60)
        purge_all(store)
        for table in (schema.report, schema.point_chunk):
            assert rows(store, table, table.c.run_id == "r1") == 0

    def test_only_what_was_deleted_and_is_whole_comes_back_and_only_within_quotas(self, store):
        fill(store)
        store.runs.delete("r1", NOW)
        for run_id, error in (("r1", Gone), ("never", NotFound)):
            with pytest.raises(error):
                store.runs.restore(run_id, NOW)
        fill(store, "r2", "s1")
        store.runs.delete("r2", NOW, undo_seconds=60.0)

        def refuse(project, what, added, count):
            raise Unprocessable(f"{project} would hold {count()} {what}, {added} more")

        with pytest.raises(Unprocessable, match="p would hold 1 runs, 1 more"):
            store.runs.restore("r2", NOW, refuse)
        tomb = schema.deleted_run
        with store.writing() as connection:
            kept = connection.execute(select(tomb.c.kept).where(tomb.c.run_id == "r2")).scalar_one()
            flipped = bytes([*kept[:-1], kept[-1] ^ 1])
            connection.execute(update(tomb).where(tomb.c.run_id == "r2").values(kept=flipped))
        with pytest.raises(Damaged, match="run r2: what its deletion kept is damaged"):
            store.runs.restore("r2", NOW)
        with pytest.raises(Gone):
            store.runs.get("r2")

    def test_pages_skip_nothing_and_repeat_nothing(self, store):
        store.check()
        page = store.runs.page(RunQuery(), NOW, 600.0)
        assert (page.runs, page.cursor) == ([], None)
        for i in range(7):
            store.runs.create("p", wire.RunCreate(run_id=f"r{i}"), NOW + i // 2)
        page = store.runs.page(RunQuery(limit=2), NOW, 600.0)
        seen = page.runs
        while page.cursor is not None:
            page = store.runs.page(RunQuery(cursor=page.cursor, limit=2), NOW, 600.0)
            seen += page.runs
        assert [run.run_id for run in seen] == [f"r{i}" for i in range(6, -1, -1)]
        for foreign in ("zz", "!!", "AAAA", "ÿ"):
            with pytest.raises(Unprocessable):
                store.runs.page(RunQuery(cursor=foreign), NOW, 600.0)

    def test_filters(self, store):
        fill(store, "r1", "s1")
        store.runs.update("r1", wire.RunUpdate(name="100% Alpha", group="g", tags=["t", "u"]), NOW)
        fill(store, "r2", "s2", project="q")
        store.runs.update("r2", wire.RunUpdate(state="finished"), NOW)
        for query, expected in (
            (RunQuery(project="p"), ["r1"]),
            (RunQuery(group="g"), ["r1"]),
            (RunQuery(tag="u"), ["r1"]),
            (RunQuery(tag="T"), []),
            (RunQuery(q="0% alp"), ["r1"]),
            (RunQuery(q="r%"), []),
            (RunQuery(strategy="plain"), ["r2", "r1"]),
            (RunQuery(strategy="plus"), []),
            (RunQuery(state="finished"), ["r2"]),
            (RunQuery(state="running"), ["r1"]),
            (RunQuery(state="stale"), []),
        ):
            assert listed(store, query) == expected, query

    def test_stale_is_running_without_a_sign_of_life_and_who_describes_a_run_gives_none(self, store):
        stream, stale = fill(store), RunQuery(state="stale")
        assert (listed(store, stale, NOW), listed(store, stale, NOW + 601)) == ([], ["r1"])
        append(store, stream, report(0, 10), now=NOW + 601)
        assert listed(store, stale, NOW + 601) == []
        assert store.runs.get("r1").updated_at == NOW + 601
        first = store.runs.revisions(["r1"])
        described = wire.RunUpdate(tags=["t"], notes="n", name="m", group="g")
        told = store.runs.update("r1", described, NOW + 1300)
        assert (told.updated_at, told.changed_at, told.notes) == (NOW + 601, NOW + 1300, "n")
        assert listed(store, stale, NOW + 1301) == ["r1"]
        assert store.runs.revisions(["r1"]) != first, "readers that keep answers must see the change"
        table = store.table.page(TableQuery(state="stale"), NOW + 1301, 600.0)
        assert [record.run_id for record, _ in table.rows] == ["r1"]
        failed = store.runs.update("r1", wire.RunUpdate(state="failed"), NOW + 1400)
        assert (failed.updated_at, failed.changed_at) == (NOW + 1400, NOW + 1400)

    def test_the_table_has_another_revision_after_each_change_and_evaluation_of_any_run(self, store):
        streams = [fill(store, f"r{place}", f"s{place}") for place in range(2)]

        def revision(**more):
            return store.table.page(TableQuery(limit=1, **more), NOW, 600.0).revision

        def evaluate(run_id):
            (due,) = [entry for entry in due_runs(store) if entry.run_id == run_id]
            keep_overview(store, due.run_id)

        append(store, streams[1], report(0, 10), now=NOW + 5)
        append(store, streams[0], report(0, 10), now=NOW + 1)
        seen = [revision()]
        assert revision() == seen[0], "nothing happened"
        for run_id in ("r1", "r0"):
            evaluate(run_id)
            seen.append(revision())
        append(store, streams[0], report(1, 20), now=NOW + 2)
        evaluate("r0")
        seen.append(revision())
        store.runs.update("r0", wire.RunUpdate(notes="n"), NOW + 6)
        seen.append(revision())
        assert len(set(seen)) == len(seen), seen
        assert revision(q="nothing is named so") == revision(q="nor so")

    def test_runs_are_grouped_by_project_strategy_and_what_is_asked_for(self, store):
        for place, group in enumerate(("g", "g", None, "h")):
            fill(store, f"r{place}", f"s{place}")
            if group:
                store.runs.update(f"r{place}", wire.RunUpdate(group=group), NOW)
        store.runs.create("q", wire.RunCreate(run_id="r4"), NOW)
        evaluate_due(store)
        cases: list[tuple[wire.GroupBy, str, list[list[str]]]] = [
            ("group", "group", [["r1", "r0"], ["r3"], ["r2"], ["r4"]]),
            ("strategy", "project", [["r3", "r2", "r1", "r0"], ["r4"]]),
            ("configuration", "strategy", [["r3", "r2", "r1", "r0"], ["r4"]]),
            ("strategy", "edq_ratio", [["r3", "r2", "r1", "r0"], ["r4"]]),
        ]
        for by, sort, expected in cases:
            page = store.table.groups(GroupQuery(by=by, sort=sort, descending=False), NOW, 600.0)
            found = [list(group.runs) for group in page.rows]
            assert (found, page.total) == (expected, len(expected)), (by, sort)
        key = page.rows[0].key
        page = store.table.groups(GroupQuery(by=by, sort="name", opened=[key], offset=2, limit=2), NOW, 600.0)
        assert ([record.run_id for record, _ in page.rows], page.total) == (["r3", "r2"], 6)

    def test_conditions_find_entries_of_every_kind_in_a_configuration(self, store):
        configs: list[dict[str, Any]] = [
            {"optimizer": {"lr": 1e-3}, "arch": "gpt", "depth": 12, "compiled": False, "betas": [0.9, 0.95]},
            {"optimizer": {"lr": 1e-2}, "arch": "gpt", "compiled": True, "loss": "mse", "größe\\": 3},
            {"optimizer": {"lr": 2}, "arch": "lstm-1", "flat.name": "whole", "empty": None},
        ]
        for place, config in enumerate(configs):
            create = wire.RunCreate(run_id=f"r{place}", name=f"run-{place}", config=config)
            store.runs.create("p", create, NOW + 60 * place)
        store.runs.create("p", wire.RunCreate(run_id="odd", config={"odd": "a\x00b", "depth": 7}), NOW - 1e6)
        expected = {
            "optimizer.lr > 1e-3": ["r2", "r1"],
            "optimizer.lr<=0.001": ["r0"],
            "optimizer.lr != 0.01": ["r2", "r0"],
            "optimizer = lr": [],
            "betas ~ 0.9": [],
            "flat.name = whole": ["r2"],
            "arch = gpt": ["r1", "r0"],
            "arch ~ LSTM": ["r2"],
            "arch ~ %": [],
            "compiled = true": ["r1"],
            "compiled = 1": [],
            "empty = null": [],
            "depth = 12": ["r0"],
            "depth ~ 12": ["r0"],
            "größe\\ = 3": ["r1"],
            "config.loss = mse": ["r1"],
            "loss > 0": [],
            "name ~ run-": ["r2", "r1", "r0"],
            "age < 90s": ["r2"],
            "never.there = 1": [],
        }
        for text, runs in expected.items():
            page = store.table.page(TableQuery(where=[text]), NOW + 180, 600.0)
            assert ([record.run_id for record, _ in page.rows], page.total) == (runs, len(runs)), text

    def test_streams_grow_at_the_end_only(self, store):
        fill(store)
        longer = {"layers": [*map(layer, LAYERS), layer("head.weight")], "statistics": [*STATISTICS, "stray"]}
        for more in (longer, {}, longer):
            assert store.streams.create_stream("r1", stream_create(**more), NOW).layers == 4
            assert store.streams.stream_record("s0").statistics[-1] == "stray"
        for wrong in (
            {"statistics": STATISTICS[::-1]},
            {"layers": [layer(LAYERS[1])]},
            {"layers": [layer("new.weight")]},
            {"rank": 1},
        ):
            with pytest.raises(Conflict):
                store.streams.create_stream("r1", stream_create(**wrong), NOW)
        assert [entry.name for entry in store.streams.layers("r1")] == [*LAYERS, "head.weight"]

    @pytest.mark.parametrize("more", [{"layers": [layer(LAYERS[0])]}, {"statistics": STATISTICS[:1]}])
    def test_a_shorter_stream_takes_no_newer_words_back(self, store, more):
        fill(store)
        store.streams.create_stream("r1", stream_create(watch=watch("kahan")), NOW)
        late = store.streams.create_stream("r1", stream_create(watch=watch("plain"), **more), NOW)
        run = store.runs.get("r1")
        assert (late.watch, run.watch) == (watch("kahan"), watch("kahan"))
        assert run.strategy == "kahan"

    def test_ranks_register_without_reading_each_other(self, store):
        fill(store)
        for rank in range(1, 5):
            register(store, f"s{rank}", rank=rank)
        with mock.patch.object(stream_store, "stream_record", wraps=stream_record) as read:
            answered = store.streams.create_stream("r1", stream_create(stream_id="s5", rank=5), NOW)
        assert [call.args[0].stream_id for call in read.call_args_list] == ["s5"]
        assert answered == next(stream for stream in store.streams.of_run("r1") if stream.stream_id == "s5")

    def test_streams_say_what_they_lack(self, store):
        store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
        with pytest.raises(NotFound, match="launch_id"):
            store.streams.create_stream("r1", stream_create(), NOW)
        launch(store, 1, 0)
        wrong: list[tuple[str, list[Any], str]] = [
            ("statistics", ["lost", "lost"], ""),
            ("statistics", ["s" * 449], ""),
            ("layers", [layer("a"), layer("a")], ""),
        ]
        for name in ("a\nb", "a\x00b", "a\x7fb", "a\x85b"):
            wrong.append(("statistics", [*STATISTICS, f"state_zero/{name}"], repr(name)[1:-1]))
            wrong.append(("layers", [layer(name)], repr(name)[1:-1]))
        for field, values, told in wrong:
            with pytest.raises(Unprocessable) as caught:
                store.streams.create_stream("r1", stream_create(**{field: values}), NOW)
            assert caught.value.field == field
            assert told in caught.value.message
        assert store.streams.layers("r1") == store.streams.of_run("r1") == []
        for unknown in ("nonsense", "update_ulp_histogram"):
            store.streams.create_stream("r1", stream_create(unknown, statistics=[unknown, "lost"]), NOW)
            (stream,) = (stream for stream in store.streams.of_run("r1") if stream.stream_id == unknown)
            assert (stream.statistics, stream.unknown_statistics) == (["lost"], [unknown])

    def test_an_export_that_comes_again_gets_the_same_number(self, store, reopen):
        """By its time and what it holds; the count is its time's."""
        stream, number = fill(store), store.journal.number_exports
        assert number(stream, [(20, 7), (10, 7), (20, 8)]) == [(0, 1), (1, 2), (2, 1)]
        again = reopen()
        number = again.journal.number_exports
        assert number(stream, [(20, 8), (30, 7), (20, 7)]) == [(2, 1), (3, 3), (0, 1)]
        assert number(stream, [(time, 7) for time in range(100, 226)])[-1] == (129, 129)
        assert number(stream, [(20, 7), (10, 7), (15, 7), (40, 7)]) == [(0, 1), None, None, (130, 130)]
        again.runs.delete("r1", NOW)
        with pytest.raises(Gone):
            number(stream, [(50, 7)])

    def test_a_statistic_that_is_new_in_the_catalogue_needs_no_migration(self, store, reopen, monkeypatch):
        entry = dataclasses.replace(metrics.STATISTICS["stray"], name="brand_new_sum")
        monkeypatch.setitem(metrics.STATISTICS, "brand_new_sum", entry)
        fill(store)
        stream = register(store, "s0", statistics=[*STATISTICS, "brand_new_sum"])
        append(store, stream, *(with_more(report(i, i + 1), 7.0) for i in range(40)))
        assert store.sealing.seal("r1", NOW)
        again = reopen()
        assert model_points(again, "r1", ["brand_new_sum"], ALL).totals["brand_new_sum"].tolist() == [21.0] * 40
        coarse = layer_points(again, "r1", ["brand_new_sum"], Selection(points=1)).totals["brand_new_sum"]
        assert coarse.sum(axis=0).tolist() == [40 * 7.0] * 3


def listed(store, query=None, now=NOW):
    return [run.run_id for run in store.runs.page(query or RunQuery(), now, 600.0).runs]
