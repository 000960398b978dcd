"""A long queue is read slab by slab: every answer has the same bits as one read at once. Every backend runs it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from collage_server.store import ReportGroup, Selection
from collage_server.store.buckets import bucket_starts
from collage_server.store.journal.decode import decode_layers
from collage_server.store.reading import unsealed
from collage_server.store.reading.waiting import SLAB_BYTES
from collage_server.store.sealing import replicas

from collage_monitor import wire
from collage_monitor.statistics import reduce_steps
from tests.server.samples import LAYERS, STATISTICS, layer, report, stream_create
from tests.server.store import replicas as replica_runs
from tests.server.store.contract import LIMITS, NOW

SLABS = (1, 20_000, 60_000)
"""A step at once; a few; more than some of the random runs have."""
KINDS = ("shards", "replicas", "mixed")


class BacklogContract:
    """Subclasses give the fixture `store` (open, empty)."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seed", range(5))
    def test_slabs_change_no_bit(self, store, kind, seed):
        generator = np.random.default_rng([seed, KINDS.index(kind)])
        store.sealing.limits = dataclasses.replace(LIMITS, points=16, part_points=8)
        ranks = fill(store, generator, kind)
        expected = bits(store, ranks, SLAB_BYTES)
        for slab_bytes in SLABS:
            assert different(expected, bits(store, ranks, slab_bytes)) == []
        assert len(expected["model all"][0]) > 8, "something to read"

    def test_whole_buckets_are_merged_on_the_way(self, store):
        """A part is sealed, sixteen points of it coarse; behind it 118 steps wait, all but the last are merged."""
        [stream] = register(store, [(1, 0, 0)], "shards")
        send(store, stream, [report(seq, seq + 1) for seq in range(32)])
        while store.sealing.seal("r1", NOW):
            pass
        send(store, stream, [report(seq, seq + 1) for seq in range(32, 150)])
        asked = Selection(points=10, buckets=True)
        single = store.points.layer_points("r1", STATISTICS, asked)
        assert single.counts.tolist() == [16, 16] + [1] * 118
        store.points._slab_bytes = 1
        merged = store.points.layer_points("r1", STATISTICS, asked)
        assert merged.counts.tolist() == [16] * 9 + [1] * 6
        assert merged.steps.tolist() == [*range(16, 145, 16), *range(145, 151)]
        assert bucket_starts(merged.counts, 10).tolist() == list(range(10))
        assert (
            store.points.layer_points("r1", STATISTICS, Selection(points=10)).counts.tolist()
            == [16, 16] + [1] * 118
        )

    def test_replicas_of_a_long_queue_are_compared(self, store, monkeypatch):
        """Forty steps in slabs of a few; at every tenth two layers of a replica differ, and are found."""
        monkeypatch.setattr(replicas, "SLAB_BYTES", 8_000)
        replica_runs.register(store, [0, 1, 1])
        good, bad = [5.0, 6.0, 7.0], [5.0, 9.0, 8.0]
        for rank, shard in ((0, 1.0), (1, 0.25), (2, 0.75)):
            told = []
            for step in range(1, 41):
                held = bad if rank == 0 and step % 10 == 0 else good
                elements = 128.0 if rank == 0 else 64.0
                told.append(replica_runs.told(step, np.multiply(shard, held), elements=elements))
            replica_runs.send(store, rank, *told)
        store.sealing.seal("r1", NOW)
        expected = [(1, step, layer, "[1]") for step in (10, 20, 30, 40) for layer in (1, 2)]
        assert replica_runs.mismatches(store) == expected

    def test_only_some_steps_are_held_at_once(self, store, monkeypatch):
        """Forty steps of three ranks, each of 22 × 3 numbers: never more rows than the slab has room for."""
        streams = register(store, [(1, rank, 0) for rank in range(3)], "shards")
        for rank, stream in enumerate(streams):
            send(store, stream, [report(seq, seq + 1, rank=rank) for seq in range(40)])
        held = []

        def counted(names, rows, keys, positions):
            held.append(len(rows))
            return decode_layers(names, rows, keys, positions)

        monkeypatch.setattr(unsealed, "decode_layers", counted)
        store.points._slab_bytes = 10 * (512 + 8 * len(STATISTICS) * len(LAYERS))
        assert len(store.points.layer_points("r1", ["lost"], Selection()).steps) == 40
        assert sum(held) == 120
        assert max(held) <= 12


def fill(store, generator, kind):
    """Random ranks, attempts and processes; gaps, rewinds, steps twice; sealed in between, some of it late."""
    count = int(generator.choice([1, 2, 3, 10]))
    places = [
        (attempt, rank, 0) for attempt in range(1, int(generator.integers(1, 4)) + 1) for rank in range(count)
    ]
    places += [(1, int(generator.integers(count)), 1) for _ in range(generator.integers(0, 2))]
    streams = register(store, places, kind)
    queues = []
    for (attempt, rank, _), stream in zip(places, streams, strict=True):
        start = 1 if attempt == 1 else 20 * attempt - 10
        steps = start + np.cumsum(generator.choice([1, 1, 1, 1, 3], 40 if count < 10 else 20))
        if generator.random() < 0.3:
            steps = np.append(steps[:30], steps[10:30])
        if generator.random() < 0.2:
            steps = generator.permutation(steps)
        queues.append((stream, [drawn(generator, seq, int(step), rank) for seq, step in enumerate(steps)]))
    late = int(generator.integers(len(queues)))
    for number in range(3):
        for place in generator.permutation(len(queues)).tolist():
            stream, reports = queues[place]
            some = reports[number::3] if generator.random() < 0.5 else reports[10 * number : 10 * number + 10]
            if number == 2 or place != late:
                send(store, stream, some)
        for _ in range(generator.integers(0, 3)):
            store.sealing.seal("r1", NOW)
    return [None, *range(count)]


def register(store, places, kind):
    store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
    streams = []
    for number, (attempt, rank, process) in enumerate(places):
        launch = wire.AttemptCreate(launch_id=f"launch-{attempt}", first_step=1 if attempt == 1 else 20 * attempt)
        store.streams.create_attempt("r1", launch, NOW)
        replicas = {
            "shards": [0, 0, 0],
            "replicas": [rank % 2] * 3,
            "mixed": [0, rank, rank % 2],
        }[kind]
        create = stream_create(
            f"s{number}",
            launch_id=f"launch-{attempt}",
            rank=rank,
            world_size=len({rank for _, rank, _ in places}),
            process_id=1000 * process + rank,
            layers=[layer(name, replica) for name, replica in zip(LAYERS, replicas, strict=True)],
        )
        store.streams.create("r1", create, NOW)
        streams.append(store.streams.record(f"s{number}"))
    return streams


def drawn(generator, seq, step, rank):
    """Numbers whose sums depend on their order, now and then a layer that was not reported, or nothing measured."""
    values = generator.lognormal(0.0, 3.0, (len(STATISTICS), len(LAYERS)))
    values[0] = 1.0
    if generator.random() < 0.1:
        values[:, generator.integers(len(LAYERS))] = np.nan
    time = NOW + step + float(generator.random())
    return report(seq, step, rank=rank, values=values, measured=generator.random() < 0.9, time=time)


def send(store, stream, reports):
    if reports:
        store.journal.append([ReportGroup(stream, reports)], NOW)


def bits(store, ranks, slab_bytes):
    """By question, every array of the answer as bytes."""
    store.points._slab_bytes = slab_bytes
    found = {}
    for rank in ranks:
        whole = store.points.model_points("r1", None, Selection(rank=rank))
        found["model all" if rank is None else f"model of rank {rank}"] = packed(whole)
    shown = Selection(points=5, extremes_of="edq_ratio")
    for name, chosen in (("middle", Selection(first_step=9, last_step=33)), ("coarse", shown)):
        found[f"model {name}"] = packed(store.points.model_points("r1", None, chosen))
        found[f"layers {name}"] = packed(store.points.layer_points("r1", STATISTICS, chosen))
        found[f"layer {name}"] = packed(store.points.layer_points("r1", ["lost"], chosen, [LAYERS[2]]))
    found["layers all"] = packed(store.points.layer_points("r1", STATISTICS, Selection()))
    store.points._newest.clear()
    latest = store.points.latest("r1")
    found["latest"] = [] if latest is None else [latest.step, *(repr(value) for value in latest.model.values())]
    for points in (1, 4, 7, 13):
        found[f"{points} buckets"] = bucketed(store, points)
    found["scalars"] = [(entry.steps.tobytes(), entry.values.tobytes()) for entry in logged(store)]
    return found


def bucketed(store, points):
    """What a heatmap makes of the points; variances, which it has no use for, have roots of squares taken twice."""
    chosen = Selection(points=points, buckets=True, first_step=3)
    found = store.points.layer_points("r1", [key for key in STATISTICS if "ariance" not in key], chosen)
    if not len(found.steps):
        return []
    starts = bucket_starts(found.counts, points)
    merged = reduce_steps(found.totals, axis=0, starts=starts)
    ends = np.append(starts[1:], len(found.steps)) - 1
    times = found.times[np.searchsorted(found.steps, found.steps[ends])]
    counted = (found.first_steps[starts], found.steps[ends], times, np.add.reduceat(found.counts, starts))
    return [array.tobytes() for array in (*counted, *(merged[key] for key in sorted(merged)))]


def logged(store):
    return store.points.scalar_points("r1", None, Selection()).values()


def packed(points):
    counted = [getattr(points, name) for name in ("steps", "first_steps", "times", "ranks", "counts")]
    totals = [array for key in sorted(points.totals) for array in (np.ascontiguousarray(points.totals[key]),)]
    extremes = [array for key in sorted(points.extremes) for array in points.extremes[key]]
    return [array.tobytes() for array in (*counted, *totals, *extremes)]


def different(expected, found):
    return [name for name in expected if expected[name] != found[name]]
