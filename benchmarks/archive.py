"""What archived files cost and save, beside a store without any: bytes, CPU of sealing and of questions, a bucket.

In process and by CPU, on SQLite. The sides of a figure take turns, and the benchmark fails if their answers differ
in a bit. Synthetic runs have 200 layers × 20 statistics: five are constants, six counts, nine log-normal with
random mantissas, and nothing repeats. Beside them stands a training: the demo's small GPT in bfloat16, watched at
every step. The bucket is a folder behind an object store's interface, with a cache on disk that holds all of it.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from collage_agent.transport import MemoryTransport
from collage_demo.corpus import standard_library
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import train
from collage_server.store import ReportGroup, Selection, Store
from collage_server.store.archive.file_storage import ArchiveFiles, Bucket, Folder
from collage_server.store.engine.database_files import checkpoint_log
from collage_server.store.records import Points
from collage_server.store.sealing.seal_plan import SealLimits

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._population import EDQ, NOW, TWENTY, UnsyncedStore, declare, twenty
from collage_monitor import wire

__all__ = ["Question", "ask", "filled", "in_turns", "measure", "opened", "questions", "reports", "trained"]

ROUNDS, GATE_ROUNDS = 9, 5
ASKED: Final = 5
"""Questions that make one value: a few milliseconds of CPU alone are not measured well."""
POINTS, LAYERS = 10_000, 200
SEALED_POINTS: Final = 2_048
STEPS: Final = 384
"""Of the training."""
_BATCH: Final = 64
_COUNTS: Final = ("idle", "lost", "distorted", "faithful", "unchanged", "lost_visible")
_CONSTANTS: Final = {
    "measured_steps": 1.0,
    "elements": 4096.0,
    "sampled": 1024.0,
    "active_blocks": 128.0,
    "nonfinite": 0.0,
}
_CACHE_BYTES: Final = 2**32
_RUN: Final = "run"
_DATABASE: Final = "collage.sqlite"


@dataclass(frozen=True)
class Cpu:
    """CPU seconds of sealing and of archiving."""

    sealing: float
    archiving: float


@dataclass(frozen=True)
class Question:
    """A question about layers; `limit` is the largest multiple of the CPU of a store without archive."""

    name: str
    selection: Selection
    limit: float


def questions() -> list[Question]:
    """At coarse levels and at level 1."""
    every, one = Selection(by_layer=True), Selection(by_layer=True, layers=("layer.100",))
    middle = POINTS // 2
    return [
        Question(f"heatmap, {POINTS:,} points × {LAYERS} layers → 400", replace(every, points=400), 1.5),
        Question(f"one layer of {POINTS:,} points → 1,000", replace(one, points=1000), 1.5),
        Question("heatmap of 2,000 points, raw", replace(every, first_step=middle, last_step=middle + 1999), 2.3),
        Question(f"one layer of {POINTS:,} points, raw", one, 2.3),
        Question(f"heatmap of all {POINTS:,} points, raw", every, 2.3),
    ]


def reports(layers: int, points: int, seed: int) -> Iterator[list[wire.Report]]:
    """Batches of reports in which no sum repeats."""
    generator = np.random.default_rng(seed)
    scales = np.exp(generator.normal(size=(len(TWENTY), layers)))
    counts, constants = ([TWENTY.index(name) for name in names] for names in (_COUNTS, _CONSTANTS))
    for first in range(0, points, _BATCH):
        count = min(_BATCH, points - first)
        tables = scales * np.exp(generator.normal(size=(count, len(TWENTY), layers)))
        tables[:, counts] = generator.integers(0, 1024, (count, len(counts), layers))
        tables[:, constants] = np.array([*_CONSTANTS.values()])[:, np.newaxis]
        yield [
            wire.Report(
                seq=step,
                step=step,
                time=NOW + step,
                scalars={"loss": 4.0 - step * 1e-5},
                statistic_count=len(TWENTY),
                layer_count=layers,
                statistics=wire.array_to_bytes(table),
                model=wire.array_to_bytes(table.sum(axis=1)),
            )
            for step, table in enumerate(tables, first)
        ]


def filled(store: Store, run_id: str, layers: int, batches: Iterable[list[wire.Report]]) -> Cpu:
    """The CPU of sealing and archiving a run while it is running and after its end."""
    [stream_id] = declare(store, run_id, twenty(layers))
    stream = store.streams.stream_record(stream_id)
    taken = []
    for batch in batches:
        store.journal.append([ReportGroup(stream, batch)], NOW)
        taken.append(settled(store, run_id))
    store.runs.update(run_id, wire.RunUpdate(state="finished"), NOW)
    taken.append(settled(store, run_id))
    return Cpu(sum(cpu.sealing for cpu in taken), sum(cpu.archiving for cpu in taken))


def settled(store: Store, run_id: str) -> Cpu:
    """Seal and archive a run's due reports; returns the CPU seconds."""
    sealing = _cpu_until(lambda: not store.sealing.seal(run_id, NOW))
    archiving = store.archiving
    return Cpu(sealing, 0.0 if archiving is None else _cpu_until(lambda: not archiving.archive(run_id)))


def _cpu_until(is_done: Callable[[], bool]) -> float:
    began = time.process_time()
    while not is_done():
        pass
    return time.process_time() - began


def trained(store: Store, folder: Path, steps: int) -> int:
    """A training's reports in the store, sealed and archived: how many numbers that is."""
    transport = MemoryTransport()
    recipe = Recipe(steps=steps, measure_every=1, batch_size=2, length=32, validate_every=steps)
    torch.set_num_threads(1)
    train(
        Plan("plain", "bfloat16"),
        recipe,
        standard_library(),
        lambda *_: None,
        transport=transport,
        folder=folder,
    )
    for envelope in transport.envelopes:
        match envelope.body:
            case wire.RunCreate() as run:
                store.runs.create(envelope.project, run, NOW)
            case wire.AttemptCreate() as attempt:
                store.streams.create_attempt(envelope.run_id, attempt, NOW)
            case wire.StreamCreate() as stream:
                store.streams.create_stream(envelope.run_id, stream, NOW)
            case wire.ReportBatch() as batch:
                record = store.streams.stream_record(envelope.stream_id)
                store.journal.append([ReportGroup(record, batch.reports)], NOW)
            case wire.RunUpdate() as update:
                store.runs.update(envelope.run_id, update, NOW)
    settled(store, transport.envelopes[0].run_id)
    return sum(report.layer_count * report.statistic_count for report in transport.reports)


def opened(stack: ExitStack, folder: Path, archive: ArchiveFiles | None = None) -> Store:
    """A store in a folder, closed with the stack."""
    folder.mkdir(parents=True, exist_ok=True)
    store = UnsyncedStore(folder / _DATABASE, stale_after_seconds=600.0, archive=archive)
    store.open()
    stack.callback(store.close)
    return store


def bytes_a_number(
    store: Store, folder: Path, empty_bytes: int, numbers: int, what: str, limit: float
) -> Iterator[Figure]:
    """The disk space of a finished run, and the database's share."""
    database = _database_bytes(store, folder, empty_bytes) / numbers
    files = _bytes_of(folder, "*.parquet") / numbers
    yield Figure(f"{what}, files and database", "bytes a number", (database + files,), limit)
    yield Figure(f"{what}, database", "bytes a number", (database,), 1.0)


def _database_bytes(store: Store, folder: Path, empty_bytes: int) -> int:
    while store.release_space():
        pass
    checkpoint_log(folder / _DATABASE)
    return _bytes_of(folder, f"{_DATABASE}*") - empty_bytes


def _bytes_of(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob(pattern))


def measure_training(root: Path, steps: int) -> Iterator[Figure]:
    """The bytes of an agent's reports."""
    folder = root / "training"
    with ExitStack() as stack:
        store = opened(stack, folder, Folder(folder / "archive"))
        checkpoint_log(folder / _DATABASE)
        empty_bytes = _bytes_of(folder, f"{_DATABASE}*")
        numbers = trained(store, root / "agent", steps)
        yield from bytes_a_number(store, folder, empty_bytes, numbers, "a training's numbers", 2.5)


def measure_sealing(root: Path, rounds: int, seed: int) -> Iterator[Figure]:
    """Sealing alone beside sealing and archiving: of the same reports, in turns."""
    batches, numbers = list(reports(LAYERS, SEALED_POINTS, seed)), SEALED_POINTS * LAYERS * len(TWENTY)
    alone, both = [], []
    with ExitStack() as stack:
        plain = opened(stack, root / "sealing")
        archived = opened(stack, root / "archiving", Folder(root / "archiving" / "archive"))
        for number in range(rounds + 1):
            alone.append(filled(plain, f"run-{number}", LAYERS, batches))
            both.append(filled(archived, f"run-{number}", LAYERS, batches))
    pairs = list(zip(alone, both, strict=True))[1:]
    ratios = tuple((b.sealing + b.archiving) / a.sealing for a, b in pairs)
    yield Figure("sealing and archiving / sealing alone, CPU", "×", ratios, 1.6)
    yield Figure("sealing alone", "CPU-s a million numbers", tuple(1e6 * a.sealing / numbers for a, _ in pairs))
    yield Figure("archiving", "CPU-s a million numbers", tuple(1e6 * b.archiving / numbers for _, b in pairs))


def measure_without_layers(root: Path, rounds: int, seed: int) -> Iterator[Figure]:
    """Runs that report their model alone: bytes and CPU, without archived files. Logged values count as numbers."""
    alone = [
        msgspec.structs.replace(report, layer_count=0, statistics=None)
        for report in itertools.chain.from_iterable(reports(1, POINTS, seed))
    ]
    # As much as is sealed at once of a run without layers.
    chunk = SealLimits().points
    batches = [alone[first : first + chunk] for first in range(0, POINTS, chunk)]
    numbers, taken = POINTS * (len(TWENTY) + 1), []
    folder = root / "without layers"
    with ExitStack() as stack:
        store = opened(stack, folder)
        checkpoint_log(folder / _DATABASE)
        empty_bytes = _bytes_of(folder, f"{_DATABASE}*")
        for number in range(rounds):
            taken.append(filled(store, f"run-{number}", 0, batches).sealing)
        held = _database_bytes(store, folder, empty_bytes) / numbers / rounds
    yield Figure("without layers and files", "bytes a number", (held,), 10.0)
    cpu = tuple(1e6 * seconds / numbers for seconds in taken)
    yield Figure("without layers, sealing", "CPU-s a million numbers", cpu, 3.0)


def measure_questions(root: Path, rounds: int, seed: int) -> Iterator[Figure]:
    """One run in three stores: without archive, in a folder, in a bucket."""
    with ExitStack() as stack:
        plain = opened(stack, root / "plain")
        checkpoint_log(root / "plain" / _DATABASE)
        empty_bytes = _bytes_of(root / "plain", f"{_DATABASE}*")
        filled(plain, _RUN, LAYERS, reports(LAYERS, POINTS, seed))
        checkpoint_log(root / "plain" / _DATABASE)
        stores = {"without": plain}
        for kind in ("folder", "bucket"):
            (root / kind).mkdir()
            shutil.copy(root / "plain" / _DATABASE, root / kind)
            stores[kind] = opened(stack, root / kind, _files(kind, root / kind))
            settled(stores[kind], _RUN)
        numbers = POINTS * LAYERS * len(TWENTY)
        yield from bytes_a_number(stores["folder"], root / "folder", empty_bytes, numbers, "random mantissas", 5.0)
        for question in questions():
            cpu = in_turns({kind: partial(ask, store, question) for kind, store in stores.items()}, rounds)
            folder, bucket, without = (cpu[kind] for kind in ("folder", "bucket", "without"))
            yield Figure(f"{question.name}: files / without, CPU", "×", _ratios(folder, without), question.limit)
            yield Figure(f"{question.name}: bucket / folder, CPU", "×", _ratios(bucket, folder), 1.2)
            yield Figure(f"{question.name}: without", "CPU-ms", tuple(1e3 * seconds for seconds in without))


def _files(kind: str, folder: Path) -> ArchiveFiles:
    if kind == "folder":
        return Folder(folder / "archive")
    (folder / "bucket").mkdir()
    return Bucket((folder / "bucket").as_uri(), folder / "cache", _CACHE_BYTES)


def ask(store: Store, question: Question) -> Points:
    """The answer to a question, from a snapshot of its own."""
    with store.points.snapshot() as snapshot:
        return snapshot.points([_RUN], EDQ, question.selection)[_RUN]


def in_turns(asked: dict[str, Callable[[], Points]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each side by round, after one that is not measured, in which answers are compared."""
    first, *others = (_bits(ask_side()) for ask_side in asked.values())
    if any(bits != first for bits in others):
        raise RuntimeError("the same question has another answer with archived files")
    taken: dict[str, list[float]] = {kind: [] for kind in asked}
    for _ in range(rounds):
        for kind, ask_side in asked.items():
            began = time.process_time()
            for _ in range(ASKED):
                ask_side()
            taken[kind].append((time.process_time() - began) / ASKED)
    return taken


def _bits(points: Points) -> list[bytes]:
    columns = (points.first_steps, points.steps, points.times, points.ranks, points.counts)
    return [np.ascontiguousarray(values).tobytes() for values in (*columns, *points.totals.values())]


def _ratios(ours: Sequence[float], known: Sequence[float]) -> tuple[float, ...]:
    return tuple(own / other for own, other in zip(ours, known, strict=True))


def measure(options: Options) -> Measuring:
    """Questions and bytes of one large run, sealing of many small ones, a training."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        yield from measure_questions(Path(name), 2 * rounds - 1, options.seed)
        yield from measure_sealing(Path(name), rounds, options.seed)
        yield from measure_without_layers(Path(name), rounds, options.seed)
        yield from measure_training(Path(name), STEPS)
    return [
        f"{rounds} rounds of sealing, {2 * rounds - 1} of {ASKED} questions, sides in turns; {STEPS} steps trained"
    ]


if __name__ == "__main__":
    sys.exit(main("archive", __doc__ or "", measure))
