"""What sealing and reading take in memory: it grows with what was reported, not with what it might have held."""

from __future__ import annotations

import numpy as np
import pytest
from collage_server.store import ReportGroup, Selection, SqliteStore
from collage_server.store.chunks import point_merging
from collage_server.store.reading import points, report_merging, unsealed
from collage_server.store.sealing.seal_plan import SealLimits
from collage_server.summariser import evaluate, newest_points

from collage_monitor import wire
from tests.server.conftest import NOW
from tests.server.samples import report as sample_report
from tests.server.samples import stream_create
from tests.server.test_memory import traced

pytestmark = pytest.mark.slow

MIB = 2**20
EDQ = ("measured_steps", "intended_squared_sum", "intended_effective_sum")
FIRST = (*EDQ, "elements", "sampled")


def statistics(count):
    states = [f"state_decrement_{kind}_sum/s{i}" for i in range(count) for kind in ("observed", "intended")]
    return [*FIRST, *states][:count]


def new_store(folder, **limits):
    store = SqliteStore(folder / "collage.sqlite", stale_after_seconds=600.0, limits=SealLimits(**limits))
    store.open()
    return store


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path)
    yield store
    store.close()


def declare(store, run_id, layers, statistic_count, *, ranks=1, own_layers=False):
    """A run of one attempt; the layers are those of all ranks, or each rank's own."""
    store.runs.create("p", wire.RunCreate(run_id=run_id), NOW)
    store.streams.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=0), NOW)
    for rank in range(ranks):
        names = [f"{rank if own_layers else ''}l{i}" for i in range(layers)]
        created = wire.StreamCreate(
            stream_id=f"{run_id}-{rank}",
            launch_id="l",
            rank=rank,
            world_size=ranks,
            layers=[wire.Layer(name=name, shape=[1], dtype="bfloat16", elements=1) for name in names],
            statistics=statistics(statistic_count),
        )
        store.streams.create_stream(run_id, created, NOW)


def report(seq, step, statistic_count, layers, parts=1):
    table = np.random.default_rng(seq).random((statistic_count, layers))
    return wire.Report(
        seq=seq,
        step=step,
        time=NOW + step,
        scalars={},
        statistic_count=statistic_count,
        layer_count=layers,
        statistics=wire.array_to_bytes(table),
        model=wire.array_to_bytes(table.sum(axis=1)),
        reports_of_step=parts,
    )


def append(store, run_id, reports, rank=0):
    store.journal.append([ReportGroup(store.streams.stream_record(f"{run_id}-{rank}"), reports)], NOW)


def seal(store, run_id):
    while store.sealing.seal(run_id, NOW, journal_full=True):
        pass


def steps_of(store, run_id):
    with store.points.snapshot() as snapshot:
        return len(snapshot.points([run_id], EDQ[:1], Selection())[run_id].steps)


def test_sealing_short_reports_of_a_run_that_declares_much_takes_little(store):
    """64 KB of journal: a table of all that the stream declares took 978 MiB."""
    declare(store, "r1", layers=5000, statistic_count=200)
    append(store, "r1", [report(i, i, 1, 1) for i in range(64)])
    with traced() as peak:
        seal(store, "r1")
    assert peak[0] < 32 * MIB
    assert steps_of(store, "r1") == 64


def test_sealing_a_step_of_many_reports_takes_no_room_for_as_many_of_each_step(store):
    """5 MB of journal took 309 MiB: every step was given room for 500 reports."""
    declare(store, "r1", layers=200, statistic_count=5)
    append(store, "r1", [report(i, 0, 5, 200, 500) for i in range(500)])
    append(store, "r1", [report(500 + i, i + 1, 5, 200) for i in range(63)])
    with traced() as peak:
        seal(store, "r1")
    assert peak[0] < 64 * MIB
    assert steps_of(store, "r1") == 64


def test_sealing_ranks_with_layers_of_their_own_takes_no_room_for_all_layers_of_each_rank(store):
    """8 MB of journal, of 32 ranks with 50 layers each, took 560 MiB: the square of the ranks."""
    declare(store, "r1", layers=50, statistic_count=20, ranks=16, own_layers=True)
    for rank in range(16):
        append(store, "r1", [report(i, i, 20, 50) for i in range(32)], rank)
    with traced() as peak:
        seal(store, "r1")
    assert peak[0] < 48 * MIB
    assert steps_of(store, "r1") == 32


def test_sealing_late_reports_takes_no_more_than_sealing_others(store):
    """All of a chunk's late reports became one part, however many bytes they were."""
    declare(store, "r1", layers=1000, statistic_count=20, ranks=2)
    append(store, "r1", [report(i, i, 1, 1) for i in range(256)])
    seal(store, "r1")
    for first in range(0, 256, 64):
        append(store, "r1", [report(i, i, 20, 1000) for i in range(first, first + 64)], rank=1)
    with traced() as peak:
        seal(store, "r1")
    assert peak[0] < 192 * MIB
    assert store.journal.bytes_of("r1") == 0


@pytest.mark.parametrize(
    "sealed", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["waiting", "sealed"]
)
def test_of_many_layers_a_question_reads_some_at_a_time(store, monkeypatch, sealed):
    """The overview, and the newest step with its worst layers, of 6 MiB of totals, in blocks as much smaller."""
    for module, name, size in (
        (points, "_MOST_BYTES", 2 * MIB),
        (point_merging, "_BLOCK_BYTES", MIB),
        (unsealed, "_MOST_BYTES", 4 * MIB),
        (unsealed, "_BYTES_AT_ONCE", MIB),
    ):
        monkeypatch.setattr(module, name, size)
    declare(store, "r1", layers=5000, statistic_count=5)
    append(store, "r1", [report(i, i, 5, 5000) for i in range(30)])
    if sealed:
        seal(store, "r1")
    with traced() as peak, store.points.snapshot() as snapshot:
        found = evaluate(snapshot, snapshot.records(["r1"])["r1"])
    assert found.last_step == 29
    assert peak[0] < (6 if sealed else 15) * MIB
    with traced() as peak, store.points.snapshot() as snapshot:
        newest = newest_points(snapshot, snapshot.records(["r1"]), layers=True)["r1"]
    assert newest is not None
    assert len(newest.worst) == 3
    assert peak[0] < 4 * MIB


def asked(store, selection):
    with store.points.snapshot() as snapshot:
        return snapshot.points(["r1"], EDQ, selection)["r1"]


def same(one, other):
    assert one.layers == other.layers
    for name in ("first_steps", "steps", "times", "ranks", "counts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.totals.keys() == other.totals.keys()
    for key, values in one.totals.items():
        np.testing.assert_array_equal(values, other.totals[key])


@pytest.mark.parametrize("sealed", [0, 40, 100])
@pytest.mark.parametrize("layers", [None, ("l6", "l1", "l2"), ("l3",)], ids=["all", "some", "one"])
def test_layers_read_in_blocks_are_those_read_at_once(store, monkeypatch, sealed, layers):
    declare(store, "r1", layers=7, statistic_count=5, ranks=2)
    for first, last in ((0, sealed), (sealed, 100)):
        for rank in range(2):
            append(store, "r1", [report(i, i, 5, 4 + rank) for i in range(first, last)], rank)
        if first < sealed:
            seal(store, "r1")
    at = Selection(by_layer=True, layers=layers, at={"r1": 33})
    few = Selection(by_layer=True, layers=layers, points=100)
    before = [asked(store, selection) for selection in (at, few)]
    monkeypatch.setattr(points, "_MOST_BYTES", 0)
    monkeypatch.setattr(point_merging, "_BLOCK_BYTES", 8 * 3 * 100 * 2)
    for selection, known in zip((at, few), before, strict=True):
        same(asked(store, selection), known)
    merged = asked(store, Selection(by_layer=True, layers=layers, points=7))
    assert len(merged.steps) == 7
    np.testing.assert_allclose(
        merged.totals["intended_squared_sum"].sum(axis=0), before[1].totals["intended_squared_sum"].sum(axis=0)
    )


def test_steps_of_many_reports_are_merged_apart_and_alike(tmp_path, monkeypatch):
    found = []
    for padding in (10**6, 0):
        monkeypatch.setattr(report_merging, "_MOST_PADDING", padding)
        folder = tmp_path / str(padding)
        folder.mkdir()
        store = new_store(folder)
        store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
        store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=0), NOW)
        for rank in range(6):
            created = stream_create(stream_id=f"r1-{rank}", rank=rank, world_size=6, replica=rank % 2)
            store.streams.create_stream("r1", created, NOW)
            steps = [step for step in range(20) if step % (rank + 1) == 0]
            append(store, "r1", [sample_report(i, step, rank=rank) for i, step in enumerate(steps)], rank)
        with store.points.snapshot() as snapshot:
            asked_for = [Selection(), Selection(by_layer=True)]
            found.append([snapshot.points(["r1"], None, selection)["r1"] for selection in asked_for])
        store.close()
    for one, other in zip(*found, strict=True):
        same(one, other)
