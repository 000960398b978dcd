"""What grows with the store, in process, by CPU: exports, a page of /metrics of 1,000 runs, a journal at its bound.

Each is gated as a ratio to what no server could leave out, measured beside it: the same numbers written by pyarrow
or encoded once as text; the page's samples written once; the journal's blobs read by key and summed. Lines a
CPU-second are stated beside the exports: 4 layers, a line a step for the model and for each layer, 38 columns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from collage_server import exposition
from collage_server.app import create_app
from collage_server.export.formats import column_names, csv_bytes, parquet_bytes
from collage_server.export.steps import ExportPlan, plan_export
from collage_server.settings import Settings
from collage_server.store import ReportGroup, Selection, Store
from collage_server.store.schema import metadata, report
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import func, insert, literal, select

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._population import STATISTICS, UnsyncedStore, seal_run
from collage_monitor import wire

STEPS, LAYERS = 20_000, 4
RUNS, RANKS = 1000, 4
JOURNAL_POINTS, JOURNAL_LAYERS = 4000, 200
ROUNDS, GATE_ROUNDS = 7, 5
NOW: Final = 1.7e9
_EDQ: Final = ("measured_steps", "intended_effective_sum", "intended_squared_sum")


def cpu_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU-seconds of this process, what came of it)."""
    before = time.process_time()
    made = work()
    return time.process_time() - before, made


def write_out(export: Callable[[Store, ExportPlan], Iterable[bytes]], store: Store, plan: ExportPlan) -> int:
    """How many bytes an export has."""
    return sum(map(len, export(store, plan)))


def fill_journal(store: Store, run_id: str, points: int, layers: int, ranks: int, seed: int) -> None:
    """A running run whose reports are not sealed."""
    generator = np.random.default_rng(seed)
    names = [wire.Layer(name=f"layer.{i}", shape=[64, 64], dtype="bfloat16", elements=4096) for i in range(layers)]
    totals, model = (wire.array_to_bytes(generator.random((len(STATISTICS), *rest))) for rest in ((layers,), ()))
    store.runs.create("p", wire.RunCreate(run_id=run_id), NOW)
    store.streams.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=0), NOW)
    for rank in range(ranks):
        stream_id = f"{run_id}-{rank}"
        create = wire.StreamCreate(
            stream_id=stream_id,
            launch_id="l",
            rank=rank,
            world_size=ranks,
            layers=names,
            statistics=list(STATISTICS),
            watch=None,
        )
        store.streams.create_stream(run_id, create, NOW)
        reports = [
            wire.Report(
                seq=seq,
                step=10 * (seq + 1),
                time=NOW + seq,
                scalars={"loss": 1.0},
                statistic_count=len(STATISTICS),
                layer_count=layers,
                statistics=totals,
                model=model,
            )
            for seq in range(points)
        ]
        store.journal.append([ReportGroup(store.streams.stream_record(stream_id), reports)], NOW)


def copy_runs(store: Store, source: str, count: int) -> None:
    """More runs like `source`, called r1, r2, …; a stream is called as its run and its rank."""
    with store.engine.begin() as connection:
        for number in range(1, count):
            for table in metadata.sorted_tables:
                if "run_id" not in table.c or table.name == "deleted_run":
                    continue
                own: dict[str, Any] = {"run_id": literal(f"r{number}")}
                if "stream_id" in table.c:
                    own["stream_id"] = func.replace(table.c.stream_id, f"{source}-", f"r{number}-")
                columns = [own.get(column.name, column).label(column.name) for column in table.c]
                rows = select(*columns).where(table.c.run_id == source)
                connection.execute(insert(table).from_select([column.name for column in table.c], rows))


def measure_exports(store: Store, rounds: int, seed: int) -> list[Figure]:
    """Both tables of a run of few layers, beside the same numbers written once."""
    seal_run(store, "exported", STEPS, LAYERS, seed)
    plan = plan_export(store, "exported", layers=True)
    lines = STEPS * (1 + LAYERS)
    columns = {name: np.random.default_rng(seed).random(lines) for name in column_names(plan)}

    pyarrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")

    def as_parquet() -> None:
        parquet.write_table(pyarrow.table(columns), BytesIO(), compression="zstd", use_dictionary=False)

    def as_text() -> None:
        for values in columns.values():
            msgspec.json.encode(values.tolist())

    figures = []
    for name, export, reference, limit in (
        ("Parquet", parquet_bytes, as_parquet, 8.0),
        ("CSV", csv_bytes, as_text, 10.0),
    ):
        ratios, rates = [], []
        for number in range(rounds + 1):
            known, _ = cpu_of(reference)
            took, _ = cpu_of(partial(write_out, export, store, plan))
            if number:
                ratios.append(took / known)
                rates.append(lines / took)
        figures.append(Figure(f"export to {name}, CPU / numbers written once", "×", tuple(ratios), limit))
        figures.append(Figure(f"export to {name}", "lines/CPU-s", tuple(rates)))
    return figures


def measure_page(store: Store, folder: Path, rounds: int, seed: int, *, sealed: bool) -> list[Figure]:
    """/metrics of many runs of several ranks, beside its samples written once; `sealed`: of an empty journal."""
    fill_journal(store, "r0", store.sealing.limits.part_points if sealed else 3, LAYERS, RANKS, seed)
    if sealed:
        store.sealing.seal("r0", NOW)
    copy_runs(store, "r0", RUNS)
    app = create_app(Settings(folder=folder, no_auth=True), store=store, clock=lambda: NOW + 10)
    components = app.state.components
    kept_up, _ = cpu_of(components.newest.do_due_work)
    kept = list(exposition._RunCollector(components, None).collect())

    class Kept:
        def collect(self) -> Any:
            return kept

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Kept())
    ratios, seconds, page = [], [], b""
    for number in range(rounds + 1):
        known, _ = cpu_of(lambda: generate_latest(registry))
        took, page = cpu_of(lambda: exposition.exposition(components))
        if number:
            ratios.append(took / known)
            seconds.append(took)
    what = f"/metrics of {RUNS} runs of {RANKS} ranks{', sealed' if sealed else ''}"
    return [
        Figure(f"{what}, CPU / its samples written once", "×", tuple(ratios), 12.0),
        Figure(what, "CPU-s", tuple(seconds)),
        Figure(f"the newest steps of {RUNS} runs{', sealed' if sealed else ''}, written", "CPU-s", (kept_up,)),
        Figure(f"{what}, size", "MB", (len(page) / 1e6,), 2.0),
    ]


def measure_journal(store: Store, rounds: int, seed: int) -> list[Figure]:
    """A heatmap of a run of which nothing is sealed, beside its blobs read and summed."""
    fill_journal(store, "unsealed", JOURNAL_POINTS, JOURNAL_LAYERS, 1, seed)
    asked = Selection(by_layer=True, points=200)

    def ask() -> None:
        with store.points.snapshot() as snapshot:
            snapshot.points(["unsealed"], _EDQ, asked)

    def read() -> None:
        with store.reading() as connection:
            blobs = connection.execute(select(report.c.statistics).where(report.c.run_id == "unsealed")).scalars()
            np.frombuffer(b"".join(blobs), dtype="<f8").sum()

    ratios, seconds = [], []
    for number in range(rounds + 1):
        known, _ = cpu_of(read)
        took, _ = cpu_of(ask)
        if number:
            ratios.append(took / known)
            seconds.append(1e3 * took)
    what = f"heatmap of {JOURNAL_POINTS} unsealed points × {JOURNAL_LAYERS} layers"
    return [
        Figure(f"{what}, CPU / its blobs read and summed", "×", tuple(ratios), 4.0),
        Figure(what, "CPU-ms", tuple(seconds)),
    ]


def measure(options: Options) -> Measuring:
    """All of them, on a store each."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stores = []
        for name in ("exports", "page", "sealed", "journal"):
            store = UnsyncedStore(root / name / "collage.sqlite", stale_after_seconds=600.0)
            store.open()
            stack.callback(store.close)
            stores.append(store)
        yield from measure_exports(stores[0], rounds, options.seed)
        yield from measure_page(stores[1], root / "page", rounds, options.seed, sealed=False)
        yield from measure_page(stores[2], root / "sealed", rounds, options.seed, sealed=True)
        yield from measure_journal(stores[3], rounds, options.seed)
    return [f"{rounds} rounds, each beside its reference; {STEPS} steps exported"]


if __name__ == "__main__":
    sys.exit(main("scale", __doc__ or "", measure))
