"""Numbers in real columns: the documented queries, and every row against what the store itself reads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from collage_server.store import ReportGroup, Selection
from sqlalchemy import text

from collage_monitor import wire
from collage_monitor.statistics import finish, reduce_steps
from tests.server.reads import layer_points, model_points
from tests.server.samples import LAYERS, report, stream_create
from tests.server.store.contract import NOW, StoreContract
from tests.server.store.seen import seal_all

DOCS = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", DOCS, re.DOTALL)
METRICS = ("edq_ratio", "lost_update_ratio", "half_ulp_margin", "update_to_weight_ratio", "grad_norm", "param_norm")


def rows(store, query):
    with store.engine.connect() as connection:
        return [dict(row) for row in connection.execute(text(query.rstrip().rstrip(";"))).mappings()]


def send(store, stream_id, reports):
    store.journal.append([ReportGroup(store.streams.stream_record(stream_id), list(reports))], NOW)


def filled(store, steps=range(1, 81)):
    StoreContract.fill(store)
    send(store, "s0", (report(i, step) for i, step in enumerate(steps)))
    seal_all(store)


def of_points(store, key):
    points = model_points(store, "r1", None, Selection())
    return dict(
        zip(points.steps.tolist(), np.broadcast_to(finish(key, points.totals), len(points.steps)), strict=True)
    )


class ReadableContract:
    """Subclasses give the fixture `store` (open, empty; chunks of 32 points)."""

    def test_a_row_a_sealed_step(self, store):
        filled(store)
        found = {row["step"]: row for row in rows(store, "SELECT * FROM run_point")}
        assert sorted(found) == list(range(1, 65)), "what waits in the journal is not there yet"
        for name in METRICS:
            expected = of_points(store, name)
            assert [found[step][name] for step in found] == pytest.approx([expected[step] for step in found]), name
        row = found[7]
        assert (row["run"], row["project"], row["ranks"], row["time"]) == ("r1", "p", 1, NOW + 7)
        assert (row["loss"], row["tokens"], row["validation_loss"]) == (4.0 - 0.07, 700.0, None)
        assert row["state_decrement_ratio"] == pytest.approx(0.25)
        assert row["edq_oracle_ratio"] is None

    def test_the_end_of_a_run_is_there(self, store):
        filled(store)
        store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
        seal_all(store)
        assert len(rows(store, "SELECT step FROM run_point")) == 80

    def test_a_row_a_layer_and_whole_chunk(self, store):
        filled(store)
        found = rows(store, "SELECT * FROM run_layer ORDER BY step, edq_ratio DESC")
        assert [(row["layer"], row["first_step"], row["step"], row["measured_steps"]) for row in found] == [
            (name, first, first + 31, 32) for first in (1, 33) for name in LAYERS
        ]
        points = layer_points(
            store, "r1", store.streams.stream_record("s0").statistics, Selection(first_step=33, last_step=64)
        )
        merged = finish("edq_ratio", reduce_steps(points.totals, axis=0))
        single = finish("edq_ratio", points.totals)
        assert [row["edq_ratio"] for row in found[3:]] == pytest.approx(merged.tolist())
        assert [row["edq_ratio_minimum"] for row in found[3:]] == pytest.approx(single.min(0).tolist())
        assert [row["edq_ratio_maximum"] for row in found[3:]] == pytest.approx(single.max(0).tolist())
        assert [row["module_type"] for row in found[3:]] == ["Embedding", "Linear", "Linear"]

    def test_a_late_rank_corrects_rows_and_keeps_what_was_logged(self, store):
        StoreContract.fill(store)
        send(store, "s0", (report(i, step) for i, step in enumerate(range(1, 41))))
        seal_all(store)
        before = rows(store, "SELECT * FROM run_point WHERE step = 5")[0]
        store.streams.create_stream("r1", stream_create("s1", rank=1, world_size=2), NOW)
        send(store, "s1", (report(i, step, rank=1, scalars={"x": 1.0}) for i, step in enumerate(range(1, 41))))
        seal_all(store)
        after = rows(store, "SELECT * FROM run_point WHERE step = 5")[0]
        assert (before["ranks"], after["ranks"], after["loss"]) == (1, 2, before["loss"])
        assert after["grad_norm"] == pytest.approx(of_points(store, "grad_norm")[5])
        assert after["grad_norm"] != pytest.approx(before["grad_norm"])

    def test_what_a_newer_attempt_hides_is_left_out(self, store):
        filled(store)
        store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-2", first_step=41), NOW)
        assert [row["step"] for row in rows(store, "SELECT step FROM run_point ORDER BY step")] == list(
            range(1, 41)
        )
        assert {row["step"] for row in rows(store, "SELECT step FROM run_layer")} == {32}
        store.runs.delete("r1", NOW)
        assert rows(store, "SELECT step FROM run_point") == rows(store, "SELECT step FROM run_layer") == []
        while store.retention.purge(100):
            pass
        assert rows(store, "SELECT step FROM measured_point") == rows(store, "SELECT step FROM layer_point") == []

    def test_retention_takes_single_points_only(self, store):
        filled(store)
        assert store.retention.expire("r1", {1: NOW + 1e9})
        assert [row["step"] for row in rows(store, "SELECT step FROM run_point ORDER BY step")] == list(
            range(33, 65)
        )
        assert {row["step"] for row in rows(store, "SELECT step FROM run_layer")} == {32, 64}

    def test_the_documented_queries(self, store):
        filled(store)
        ended, worst = (rows(store, query) for query in QUERIES)
        expected = of_points(store, "edq_ratio")
        last = [step for step in range(1, 65) if step > 0.9 * 64]
        assert [(row["run"], row["points"]) for row in ended] == [("r1", len(last))]
        assert ended[0]["edq_ratio"] == pytest.approx(np.mean([expected[step] for step in last]))
        assert ended[0]["loss"] == pytest.approx(np.mean([4.0 - 0.01 * step for step in last]))
        assert [row["layer"] for row in worst] == LAYERS[::-1]
        assert {row["step"] for row in worst} == {64}
