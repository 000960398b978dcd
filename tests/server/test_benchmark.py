"""The ingest benchmark sends what a real server accepts, and its null store writes nothing."""

from __future__ import annotations

import numpy as np
from collage_server.store import ReportGroup, Selection

from benchmarks._ingest_server import NullStore
from benchmarks.ingest import LAYERS, NAMES, NUMBERS, bodies
from collage_monitor import wire
from tests.server.samples import layer, stream_create


def declared():
    return stream_create(layers=[layer(f"layer.{i}") for i in range(LAYERS)], statistics=list(NAMES))


def test_its_reports_are_accepted(server):
    server.run()
    server.attempt()
    server.post("/runs/r1/streams", declared())
    for body in bodies(0, 20, 10, np.random.default_rng(0)):
        answer = server.post("/streams/s0/reports", body, wire.BatchAnswer)
        assert (answer.accepted, answer.rejected) == (10, [])
    assert len(server.series("lost").steps) == 20
    assert NUMBERS == 500


def test_the_null_store_acknowledges_without_writing(tmp_path):
    store = NullStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    store.create_run("p", wire.RunCreate(run_id="r1"), 0.0)
    store.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=0), 0.0)
    store.create_stream("r1", declared(), 0.0)
    batch = wire.decode_batch(bodies(0, 5, 5, np.random.default_rng(0))[0])
    [outcome] = store.append([ReportGroup(store.stream_record("s0"), batch.reports)], 0.0)
    assert outcome.accepted == 5
    assert len(store.model_points("r1", None, Selection()).steps) == 0
    store.close()
