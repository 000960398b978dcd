"""What a run with a long journal costs the server: memory that grows with its reports, not with their square."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import httpx
import numpy as np
import pytest
from collage_server.store import ReportGroup, Selection, SqliteStore
from collage_server.store.reading import unsealed
from collage_server.summariser import evaluate

from benchmarks._population import Shape, batches, register
from benchmarks._serving import Connection, serving
from collage_monitor import wire
from collage_monitor.statistics import reduce_steps
from tests.server.conftest import NOW
from tests.server.samples import LAYERS, report, stream_create
from tests.server.test_memory import traced
from tests.waiting import until

pytestmark = pytest.mark.slow

KEYS = ("measured_steps", "intended_squared_sum", "intended_effective_sum")
TINY = Shape("tiny", 1, ("measured_steps", "elements", "sampled", "intended_squared_sum", "intended_effective_sum"))
REPORTS = 10_000
MOST_GROWTH = 256 * 2**20


def peak_bytes(process_id):
    """The most memory that the process has had."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def evaluated_step(port, run_id):
    """The last step of the run's overview; None before there is one."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/runs/{run_id}/overview", timeout=2.0)
    except httpx.TimeoutException:
        return None
    return answer.json().get("last_step")


@pytest.mark.nightly
def test_ten_thousand_small_reports_of_one_run_are_evaluated_within_256_mib(tmp_path):
    with serving(tmp_path, seal_interval_seconds=1e6) as (process_id, port), Connection(port) as connection:
        register(port, "r1", TINY, 1)
        before = peak_bytes(process_id)
        for batch in batches(TINY, 0, REPORTS, 2000, 0):
            connection.post("/streams/r1-0/reports", wire.encode_batch(batch))

        def is_evaluated():
            assert peak_bytes(process_id) - before < MOST_GROWTH
            return evaluated_step(port, "r1") == REPORTS - 1

        until(is_evaluated, "the evaluation of the run")
        assert peak_bytes(process_id) - before < MOST_GROWTH


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
    store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=0), NOW)
    yield store
    store.close()


def declare(store, layers):
    """A stream of so many layers."""
    named = [wire.Layer(name=f"l{i}", shape=[1], dtype="bfloat16", elements=1) for i in range(layers)]
    created = wire.StreamCreate(
        stream_id="s0", launch_id="launch-1", rank=0, world_size=1, layers=named, statistics=list(TINY.statistics)
    )
    store.streams.create_stream("r1", created, NOW)


def append(store, first, count):
    """Reports of the first layer alone, which every stream may send before it knows the others."""
    [batch] = batches(TINY, first, count, count, 0)
    store.journal.append([ReportGroup(store.streams.stream_record("s0"), batch.reports)], NOW)


def test_what_is_read_grows_with_the_layers_declared_or_the_reports_not_with_their_product(store):
    declare(store, 5000)
    asked = Selection(points=128, by_layer=True)
    peaks = []
    for first, count in ((0, 1000), (1000, 3000)):
        append(store, first, count)
        with traced() as peak, store.points.snapshot() as snapshot:
            points = snapshot.points(["r1"], KEYS[1:], asked)["r1"]
        assert 64 <= len(points.steps) <= 300
        assert points.counts.sum() == first + count
        peaks += peak
    assert peaks[1] < 1.5 * peaks[0] < MOST_GROWTH


def test_a_run_that_declares_more_than_it_reports_is_evaluated_within_256_mib(store):
    declare(store, 10_000)
    append(store, 0, 2000)
    with traced() as peak, store.points.snapshot() as snapshot:
        found = evaluate(snapshot, snapshot.records(["r1"])["r1"])
    assert found.last_step == 1999
    assert peak[0] < MOST_GROWTH


@pytest.mark.parametrize("sealed", [False, True], ids=["nothing sealed", "sealed, and late reports"])
def test_steps_merged_as_they_are_read_are_those_merged_afterwards(store, monkeypatch, sealed):
    for rank in range(2):
        store.streams.create_stream("r1", stream_create(stream_id=f"s{rank}", rank=rank, world_size=2), NOW)
    steps = [*range(0, 400, 4), *range(400, 500)]
    late = {30, 31, 199}
    first, rest = [[i for i in range(len(steps)) if (i < 70 and i not in late) is early] for early in (True, False)]
    for part, rank in ((part, rank) for part in (first, rest) for rank in range(2)):
        reports = [report(seq, steps[seq], rank=rank) for seq in part if rank or seq not in late or seq > 70]
        store.journal.append([ReportGroup(store.streams.stream_record(f"s{rank}"), reports)], NOW)
        while sealed and rank and part is first and store.sealing.seal("r1", NOW, journal_full=True):
            pass

    def read(selection):
        with store.points.snapshot() as snapshot:
            return snapshot.points(["r1"], KEYS, selection)["r1"]

    single = [read(Selection(by_layer=by_layer)) for by_layer in (False, True)]
    monkeypatch.setattr(unsealed, "_MOST_BYTES", 0)
    for by_layer, rows_at_once, wanted in product((False, True), (1, 16), (1, 7, 40)):
        row = 8 * len(KEYS) * (len(LAYERS) if by_layer else 1)
        monkeypatch.setattr(unsealed, "_BYTES_AT_ONCE", rows_at_once * row)
        merged = read(Selection(by_layer=by_layer, points=wanted))
        check_merged(merged, single[by_layer])
        assert sealed or wanted <= len(merged.steps) <= 2 * wanted


def check_merged(merged, single):
    assert len(merged.steps) < len(single.steps)
    assert merged.counts.sum() == len(single.steps)
    starts = np.append(0, np.cumsum(merged.counts)[:-1])
    assert merged.first_steps.tolist() == single.first_steps[starts].tolist()
    assert merged.steps.tolist() == single.steps[np.cumsum(merged.counts) - 1].tolist()
    assert merged.ranks.tolist() == np.minimum.reduceat(single.ranks, starts).tolist()
    for key, expected in reduce_steps(single.totals, axis=0, starts=starts).items():
        np.testing.assert_allclose(merged.totals[key], expected, rtol=1e-12)
