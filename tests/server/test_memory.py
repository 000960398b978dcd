"""What a server takes in memory: it grows with what was reported, not with what might have been, and is bounded.

Logged values take more memory as objects than on the wire; what is held of them at a time is bounded, too.
"""

import re
import tracemalloc
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from collage_server.errors import TooLarge
from collage_server.ingest.report_checks import decoded_batch
from collage_server.settings import FixedLimits
from collage_server.store import ReportGroup, Selection, SqliteStore
from collage_server.store.chunks import point_merging
from collage_server.store.reading import points, report_merging, unsealed
from collage_server.store.reading.report_merging import decode_layers
from collage_server.store.sealing.seal_plan import SealLimits
from collage_server.summariser import evaluate, newest_points

from benchmarks._population import Shape, batches, register
from benchmarks._serving import Connection, run_cluster, serving
from collage_monitor import wire
from collage_monitor.statistics import reduce_steps
from drills.torture.growth import FEEDS, exported, fed_and_asked, many_statistics, measured
from tests.server.conftest import NOW, holding, running
from tests.server.migrated import put_migrated
from tests.server.reads import model_points
from tests.server.samples import LAYERS, STATISTICS, report, report_of_totals, stream_create
from tests.server.store.postgresql import programs_or_skip
from tests.server.store.stores import ALL
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

MIB = 2**20
MOST_GROWTH = 256 * MIB
NAMES = wire.LIMITS["scalars_per_report"]
EDQ = ("measured_steps", "intended_squared_sum", "intended_effective_sum")
FIRST = (*EDQ, "elements", "sampled")


@contextmanager
def traced():
    """A list that gets the most bytes that were held at a time beyond those held before."""
    tracemalloc.start()
    peak: list[int] = []
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def new_store(folder):
    """A store with a run of one launch."""
    folder.mkdir(exist_ok=True)
    store = SqliteStore(put_migrated(folder), stale_after_seconds=600.0)
    store.open()
    store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
    store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=0), NOW)
    return store


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path)
    yield store
    store.close()


def declare(store, layers, statistic_count, *, ranks=1, own_layers=False):
    """A stream for each rank; the layers are those of all ranks, or each rank's own."""
    kinds = ("observed", "intended")
    states = [f"state_decrement_{kind}_sum/s{i}" for i in range(statistic_count) for kind in kinds]
    statistics = [*FIRST, *states][:statistic_count]
    for rank in range(ranks):
        names = [f"{rank if own_layers else ''}l{i}" for i in range(layers)]
        named = [wire.Layer(name=name, shape=[1], dtype="bfloat16", elements=1) for name in names]
        given = {"layers": named, "statistics": statistics, "watch": None}
        store.streams.create_stream("r1", stream_create(f"s{rank}", rank=rank, world_size=ranks, **given), NOW)


def declare_samples(store, ranks=1, replicas=1):
    """A stream for each rank, of layers and statistics that sample reports have."""
    for rank in range(ranks):
        created = stream_create(f"s{rank}", rank=rank, world_size=ranks, replica=rank % replicas)
        store.streams.create_stream("r1", created, NOW)


def random_report(seq, step, statistic_count, layers, parts=1):
    table = np.random.default_rng(seq).random((statistic_count, layers))
    return report_of_totals(seq, step, table, reports_of_step=parts)


def random_reports(steps, statistic_count, layers):
    return [random_report(step, step, statistic_count, layers) for step in steps]


def append(store, reports, rank=0):
    store.journal.append([ReportGroup(store.streams.stream_record(f"s{rank}"), reports)], NOW)


def seal(store):
    """All that there is; the most bytes that it takes at a time."""
    with traced() as peak:
        while store.sealing.seal("r1", NOW, journal_full=True):
            pass
    return peak[0]


def steps_of(store):
    return len(model_points(store, "r1", EDQ[:1], ALL).steps)


def evaluated(store):
    """(the overview, the most bytes that making it takes at a time)."""
    with traced() as peak, store.points.snapshot() as snapshot:
        found = evaluate(snapshot, snapshot.records(["r1"])["r1"])
    return found, peak[0]


def test_sealing_short_reports_of_a_run_that_declares_much_takes_little(store):
    """64 KB of journal: a table of all that the stream declares took 978 MiB."""
    declare(store, layers=5000, statistic_count=200)
    append(store, random_reports(range(64), 1, 1))
    assert seal(store) < 32 * MIB
    assert steps_of(store) == 64


def test_sealing_a_step_of_many_reports_takes_no_room_for_as_many_of_each_step(store):
    """5 MB of journal took 309 MiB: every step was given room for 500 reports."""
    declare(store, layers=200, statistic_count=5)
    append(store, [random_report(i, 0, 5, 200, 500) for i in range(500)])
    append(store, [random_report(500 + i, i + 1, 5, 200) for i in range(63)])
    assert seal(store) < 64 * MIB
    assert steps_of(store) == 64


def test_sealing_ranks_with_layers_of_their_own_takes_no_room_for_all_layers_of_each_rank(store):
    """8 MB of journal, of 32 ranks with 50 layers each, took 560 MiB: the square of the ranks."""
    declare(store, layers=50, statistic_count=20, ranks=16, own_layers=True)
    for rank in range(16):
        append(store, random_reports(range(32), 20, 50), rank)
    assert seal(store) < 48 * MIB
    assert steps_of(store) == 32


def test_sealing_late_reports_takes_no_more_than_sealing_others(store):
    """All of a chunk's late reports became one part, however many bytes they were."""
    declare(store, layers=1000, statistic_count=20, ranks=2)
    append(store, random_reports(range(256), 1, 1))
    seal(store)
    for first in range(0, 256, 64):
        append(store, random_reports(range(first, first + 64), 20, 1000), rank=1)
    assert seal(store) < 192 * MIB
    assert store.journal.bytes_of("r1") == 0


def logged(count, first=0):
    """Reports of nothing but scalars, as many each as one may hold, under names as short as they come."""
    scalars = {f"{name:03}": 1.0 for name in range(NAMES)}
    return [wire.Report(seq=seq, step=seq, time=1.0, scalars=scalars) for seq in range(first, first + count)]


def test_a_journal_of_many_scalars_is_sealed_in_bounded_pieces_and_counts_what_reading_them_takes(store):
    store.sealing.limits = SealLimits(bytes=MIB)
    declare_samples(store)
    group = ReportGroup(store.streams.stream_record("s0"), logged(500))
    store.journal.append([group], NOW)
    with traced() as peak, store.points.snapshot() as snapshot:
        snapshot.scalars(["r1"], None, Selection())
    counted = store.journal.bytes_of("r1")
    assert peak[0] < 1.5 * counted
    assert counted <= sum(group.journal_bytes) < 1.5 * counted
    assert seal(store) < 3 * MIB
    with store.points.snapshot() as snapshot:
        found = snapshot.scalars(["r1"], ["000"], Selection())["r1"]["000"]
    assert (found.steps.tolist(), set(found.values.tolist())) == (list(range(500)), {1.0})
    assert store.journal.bytes_of("r1") == 0


def test_of_a_long_journal_what_is_not_asked_for_stands_in_memory_once(store):
    """All its totals by layer, 16 MiB here, were put side by side for one of them: 22 MiB."""
    declare_samples(store)
    statistics, layers = len(STATISTICS), len(LAYERS)
    counts = {"statistic_count": statistics, "layer_count": layers}
    held: Any = SimpleNamespace(stream_id="s0", statistics=bytes(8 * statistics * layers), **counts)
    count = 2**24 // len(held.statistics)
    with traced() as peak:
        streams = {"s0": store.streams.stream_record("s0")}
        table = decode_layers(streams, [held] * count, STATISTICS[:1], np.arange(layers))
    assert table.array.shape == (1, count, layers)
    assert not table.array.any()
    assert peak[0] < count * len(held.statistics)


def test_what_is_read_grows_with_the_layers_declared_or_the_reports_not_with_their_product(store):
    declare(store, 5000, 5)
    peaks = []
    for steps in (range(1000), range(1000, 4000)):
        append(store, random_reports(steps, 5, 1))
        with traced() as peak, store.points.snapshot() as snapshot:
            found = snapshot.points(["r1"], EDQ[1:], Selection(points=128, by_layer=True))["r1"]
        assert 64 <= len(found.steps) <= 300
        assert found.counts.sum() == steps.stop
        peaks += peak
    assert peaks[1] < 1.5 * peaks[0] < MOST_GROWTH


def test_a_run_that_declares_more_than_it_reports_is_evaluated_within_256_mib(store):
    declare(store, 10_000, 5)
    append(store, random_reports(range(2000), 5, 1))
    found, peak = evaluated(store)
    assert (found.last_step, peak < MOST_GROWTH) == (1999, True)


@pytest.mark.parametrize(
    "sealed", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["waiting", "sealed"]
)
def test_of_many_layers_a_question_reads_some_at_a_time(store, monkeypatch, sealed):
    """The overview, and the newest step with its worst layers, of 6 MiB of totals, in blocks as much smaller."""
    monkeypatch.setattr(points, "_MOST_BYTES", 2 * MIB)
    monkeypatch.setattr(point_merging, "_BLOCK_BYTES", MIB)
    monkeypatch.setattr(unsealed, "_MOST_BYTES", 4 * MIB)
    monkeypatch.setattr(unsealed, "_BYTES_AT_ONCE", MIB)
    declare(store, layers=5000, statistic_count=5)
    append(store, random_reports(range(30), 5, 5000))
    if sealed:
        seal(store)
    found, peak = evaluated(store)
    assert found.last_step == 29
    assert peak < (6 if sealed else 15) * MIB
    with traced() as peaks, store.points.snapshot() as snapshot:
        newest = newest_points(snapshot, snapshot.records(["r1"]), layers=True)["r1"]
    assert newest is not None
    assert len(newest.worst) == 3
    assert peaks[0] < 4 * MIB


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
    declare(store, layers=7, statistic_count=5, ranks=2)
    for steps in (range(sealed), range(sealed, 100)):
        for rank in range(2):
            append(store, random_reports(steps, 5, 4 + rank), rank)
        if steps.start < sealed:
            seal(store)
    at = Selection(by_layer=True, layers=layers, at={"r1": 33})
    few = Selection(by_layer=True, layers=layers, points=100)
    before = [model_points(store, "r1", EDQ, selection) for selection in (at, few)]
    monkeypatch.setattr(points, "_MOST_BYTES", 0)
    monkeypatch.setattr(point_merging, "_BLOCK_BYTES", 8 * 3 * 100 * 2)
    for selection, known in zip((at, few), before, strict=True):
        same(model_points(store, "r1", EDQ, selection), known)
    merged = model_points(store, "r1", EDQ, Selection(by_layer=True, layers=layers, points=7))
    assert len(merged.steps) == 7
    squares = [found.totals["intended_squared_sum"].sum(axis=0) for found in (merged, before[1])]
    np.testing.assert_allclose(*squares)


def test_steps_of_many_reports_are_merged_apart_and_alike(tmp_path, monkeypatch):
    found = []
    for padding in (10**6, 0):
        monkeypatch.setattr(report_merging, "_MOST_PADDING", padding)
        store = new_store(tmp_path / str(padding))
        declare_samples(store, ranks=6, replicas=2)
        for rank in range(6):
            steps = range(0, 20, rank + 1)
            append(store, [report(i, step, rank=rank) for i, step in enumerate(steps)], rank)
        found.append([model_points(store, "r1", None, Selection(by_layer=by_layer)) for by_layer in (False, True)])
        store.close()
    for one, other in zip(*found, strict=True):
        same(one, other)


@pytest.mark.parametrize("sealed", [False, True], ids=["nothing sealed", "sealed, and late reports"])
def test_steps_merged_as_they_are_read_are_those_merged_afterwards(store, monkeypatch, sealed):
    declare_samples(store, ranks=2)
    steps = [*range(0, 400, 4), *range(400, 500)]
    late = {30, 31, 199}
    first, rest = [[i for i in range(len(steps)) if (i < 70 and i not in late) is early] for early in (True, False)]
    for part, rank in product((first, rest), range(2)):
        append(store, [report(i, steps[i], rank=rank) for i in part if rank or i not in late or i > 70], rank)
        if sealed and rank and part is first:
            seal(store)
    single = [model_points(store, "r1", EDQ, Selection(by_layer=by_layer)) for by_layer in (False, True)]
    monkeypatch.setattr(unsealed, "_MOST_BYTES", 0)
    for by_layer, rows_at_once, wanted in product((False, True), (1, 16), (1, 7, 40)):
        row = 8 * len(EDQ) * (len(LAYERS) if by_layer else 1)
        monkeypatch.setattr(unsealed, "_BYTES_AT_ONCE", rows_at_once * row)
        merged = model_points(store, "r1", EDQ, Selection(by_layer=by_layer, points=wanted))
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


def test_a_run_whose_scalars_fill_the_journal_is_told_to_wait(settings):
    """Two megabytes on the wire are more than the bound once they are read."""
    limits = FixedLimits(journal_run_bytes=2**22, seal_interval_seconds=1e6)
    with running(settings, limits=limits) as server:
        server.filled(steps=())
        server.stop_threads()
        sent = [logged(250, first) for first in (0, 250, 500)]
        answers = [server.sent(*reports) for reports in sent]
    assert sum(len(wire.encode_batch(wire.ReportBatch(reports=reports))) for reports in sent) < 2**21
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert answers[1].headers["retry-after"] == "2"


def test_too_many_scalars_of_a_report_or_gaps_of_a_batch_are_refused_before_they_are_decoded():
    many = {f"{name:x}": 1 for name in range(300_000)}
    own = {"step": 1, "time": 1.0}
    some = [{"seq": 0, **own}, {"seq": 1, **own, "scalars": many}, {"seq": 2, **own, "scalars": {"a": 1}}]
    body = msgspec.msgpack.encode({"reports": some})
    with traced() as peak:
        batch, refused = decoded_batch(body, wire.MSGPACK)
    assert peak[0] < len(body) / 10
    assert [report.seq for report in batch.reports] == [0, 2]
    [entry] = refused
    assert (entry.index, entry.seq, entry.code, entry.field) == (1, 1, "too_many", "scalars")
    assert (entry.limit, entry.message) == (NAMES, f"300000 scalars, at most {NAMES}")
    alone, refused = decoded_batch(msgspec.msgpack.encode({"reports": some[1:2]}), wire.MSGPACK)
    assert (alone.reports, len(refused)) == ([], 1)
    gap = {"first_seq": 1, "last_seq": 2, "reason": "full"}
    body = msgspec.msgpack.encode({"reports": [], "gaps": [gap] * 100_000})
    with traced() as peak, pytest.raises(TooLarge) as caught:
        decoded_batch(body, wire.MSGPACK)
    assert (caught.value.field, peak[0] < len(body) / 10) == ("gaps", True)


def test_what_is_refused_of_a_large_body_is_numbered_as_it_was_sent(server):
    server.filled(steps=range(1, 3))
    reports = [{"seq": seq, "step": seq, "time": 1.0, "scalars": {"a": 1.0}} for seq in range(10, 2000)]
    reports[3]["seq"] = "x"
    reports[5]["scalars"] = {str(name): 1.0 for name in range(NAMES + 1)}
    reports[7]["statistic_count"] = 99
    for content_type, encode in ((wire.JSON, msgspec.json.encode), (wire.MSGPACK, msgspec.msgpack.encode)):
        answer = server.sent(body=encode({"reports": reports}), **{"Content-Type": content_type})
        found = [(entry["index"], entry["seq"], entry["code"]) for entry in answer.json()["rejected"]]
        assert found == [(3, None, "unreadable"), (5, 15, "too_many"), (7, 17, "undeclared")]


def test_a_body_in_flight_holds_what_its_scalars_take_as_objects(settings):
    with running(settings, limits=FixedLimits(in_flight_bytes=2**22)) as server:
        server.filled(steps=())
        assert len(wire.encode_batch(wire.ReportBatch(reports=logged(350)))) < MIB
        with holding(server.state.memory.bodies, 2**10):
            assert [server.sent(*logged(count)).status_code for count in (50, 350)] == [200, 503]
        assert server.sent(*logged(350)).json()["accepted"] == 300


def test_a_body_that_waits_for_its_commit_stands_in_memory_once(server, monkeypatch):
    server.filled(steps=range(1, 3))
    body = wire.encode_batch(wire.ReportBatch(reports=[report(seq, seq) for seq in range(10, 4000)]))
    held: list[int] = []

    def submit(group, submit=server.state.writer.submit):
        held.append(tracemalloc.get_traced_memory()[0])
        return submit(group)

    monkeypatch.setattr(server.state.writer, "submit", submit)
    with traced():
        answer = server.sent(body=body)
    assert answer.json()["accepted"] == 3990
    assert held[0] < 2 * len(body)


# Real servers in processes of their own, at their limits.

TINY = Shape("tiny", 1, FIRST)


def peak_bytes(process_id):
    """The most memory that the process has had."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process_id}/status").read_text())[0])


@pytest.mark.nightly
def test_ten_thousand_small_reports_of_one_run_are_evaluated_within_256_mib(tmp_path):
    with serving(tmp_path, seal_interval_seconds=1e6) as (process_id, port), Connection(port) as connection:
        register(port, "r1", TINY, 1)
        before = peak_bytes(process_id)
        for batch in batches(TINY, 0, 10_000, 2000, 0):
            connection.post("/streams/r1-0/reports", wire.encode_batch(batch))

        def is_evaluated():
            assert peak_bytes(process_id) - before < MOST_GROWTH
            path = f"http://127.0.0.1:{port}/api/v1/runs/r1/overview"
            return httpx.get(path, timeout=PATIENCE_SECONDS).json().get("last_step") == 9999

        until(is_evaluated, "the evaluation of the run")
        assert peak_bytes(process_id) - before < MOST_GROWTH


@pytest.mark.nightly
def test_exports_at_the_limit_of_statistics_stay_within_the_budget(tmp_path):
    """Four at once took 444 MiB of 512: what an export computes and writes was nobody's.

    That exports ask for what they take, `test_memory_budget` holds by day.
    """
    with measured(tmp_path, memory="384M") as (connection, port, peak):
        many_statistics(connection, 1, reports=30)
        sizes = exported(port, ("csv", "parquet", "csv"))
    assert min(sizes) > MIB
    assert peak.bytes <= 384 * MIB, peak.told()


@pytest.mark.nightly
@pytest.mark.parametrize("fill", FEEDS, ids=lambda fill: fill.__name__)
@pytest.mark.parametrize(("times", "database"), [(1, "sqlite"), (4, "sqlite"), (4, "postgresql")])
def test_a_server_fed_at_a_limit_and_asked_everything_stays_within_512_mib(tmp_path, fill, times, database):
    if database == "sqlite":
        fed_and_asked(tmp_path, fill, times)
        return
    programs_or_skip()
    with run_cluster() as cluster:
        assert cluster is not None
        fed_and_asked(tmp_path, fill, times, database=cluster[0])
