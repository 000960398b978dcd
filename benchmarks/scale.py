"""What grows with the store, in process, by CPU: exports, a page of /metrics of 1,000 runs, a journal at its bound.

Each is gated as a ratio to work that no server could leave out, measured beside it: the same numbers written by
pyarrow or encoded once as text; the page's samples written once; the journal's blobs read by key and summed. A page
and a round of alerts over 7,000 runs are gated in CPU-seconds, too. Lines a CPU-second are stated beside the
exports: 4 layers, a line a step for the model and for each layer, 38 columns.
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
from typing import Any

import msgspec
import numpy as np
from collage_server import exposition
from collage_server.alerts import AlertEvaluator
from collage_server.alerts.condition_evaluation import Evaluation
from collage_server.app import create_app
from collage_server.app_state import AppState
from collage_server.export.file_formats import column_names, csv_bytes, parquet_bytes
from collage_server.export.step_batches import ExportPlan, plan_export
from collage_server.settings import Settings
from collage_server.store import ReportGroup, Selection, Store
from collage_server.store.schema import report
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import select

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._population import EDQ, NOW, Shape, UnsyncedStore, copy_often, declare, seal_run, twenty
from collage_monitor import wire
from collage_monitor.alerts import enabled_alerts

STEPS, LAYERS = 20_000, 4
RUNS, RANKS, EMPTY_RUNS = 1000, 4, 5000
INTERVAL = 15.0
LOGGING = Shape("logging", 0, ())
JOURNAL_POINTS, JOURNAL_LAYERS = 4000, 200
ROUNDS, GATE_ROUNDS = 7, 5


def beside(
    reference: Callable[[], Any], work: Callable[[], Any], rounds: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """CPU of the work over that of its reference, and the work's CPU-seconds, a value a round after the first."""
    taken = [(_cpu_of(reference), _cpu_of(work)) for _ in range(rounds + 1)][1:]
    return tuple(own / known for known, own in taken), tuple(own for _, own in taken)


def _cpu_of(work: Callable[[], Any]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def write_out(export: Callable[[Store, ExportPlan], Iterable[bytes]], store: Store, plan: ExportPlan) -> int:
    """How many bytes an export has."""
    return sum(map(len, export(store, plan)))


def measure_exports(store: Store, rounds: int, seed: int) -> list[Figure]:
    """Both tables of a run of few layers, beside the same numbers written once."""
    seal_run(store, "exported", twenty(LAYERS), STEPS, seed=seed)
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
        ratios, seconds = beside(reference, partial(write_out, export, store, plan), rounds)
        figures.append(Figure(f"export to {name}, CPU / numbers written once", "×", ratios, limit))
        figures.append(Figure(f"export to {name}", "lines/CPU-s", tuple(lines / took for took in seconds)))
    return figures


def measure_page(store: Store, folder: Path, rounds: int, seed: int, *, sealed: bool) -> list[Figure]:
    """/metrics of many runs of several ranks, beside its samples written once; `sealed`: of an empty journal."""
    points = store.sealing.limits.part_points if sealed else 3
    seal_run(store, "run", twenty(LAYERS), points, RANKS, seed=seed, sealed=False)
    if sealed:
        store.sealing.seal("run", NOW)
    copy_often(store, "run", RUNS - 1)
    app_state = _state_of(store, folder)
    kept_up = _cpu_of(app_state.summariser.keep_points)
    what = f"/metrics of {RUNS} runs of {RANKS} ranks{', sealed' if sealed else ''}"
    return [
        *page_figures(app_state, what, rounds),
        Figure(f"the newest steps of {RUNS} runs{', sealed' if sealed else ''}, written", "CPU-s", (kept_up,)),
        Figure(f"{what}, size", "MB", (len(exposition.exposition(app_state)) / 1e6,), 2.0),
    ]


def _state_of(store: Store, folder: Path) -> AppState:
    app = create_app(Settings(folder=folder, no_auth=True), store=store, clock=lambda: NOW + 10)
    state: AppState = app.state.collage
    return state


def page_figures(app_state: AppState, what: str, rounds: int, most_seconds: float | None = None) -> list[Figure]:
    """The page beside its samples written once."""
    kept = list(exposition._RunCollector(app_state, None).collect())

    class Kept:
        def collect(self) -> Any:
            return kept

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Kept())
    ratios, seconds = beside(lambda: generate_latest(registry), lambda: exposition.exposition(app_state), rounds)
    return [
        Figure(f"{what}, CPU / its samples written once", "×", ratios, 12.0),
        Figure(what, "CPU-s", seconds, most_seconds),
    ]


def measure_all_kinds(store: Store, folder: Path, rounds: int, seed: int) -> list[Figure]:
    """/metrics and a round of alerts over runs that measure, runs that only log, and runs that say nothing.

    Alerts remember an hour, and those that measure are past the steps at which no alert judges.
    """
    seal_run(store, "run", twenty(LAYERS), 3, seed=seed, sealed=False)
    with store.points.snapshot() as snapshot:
        [measuring] = snapshot.streams("run")
    past = wire.Report(seq=3, step=1000, time=NOW, scalars={"loss": 4.0})
    store.journal.append([ReportGroup(store.streams.stream_record(measuring.stream_id), [past])], NOW)
    copy_often(store, "run", RUNS - 1)
    [stream_id] = declare(store, "logging", LOGGING)
    stream = store.streams.stream_record(stream_id)
    logged = [wire.Report(seq=seq, step=seq, time=NOW + seq, scalars={"loss": 4.0}) for seq in range(3)]
    store.journal.append([ReportGroup(stream, logged)], NOW)
    copy_often(store, "logging", RUNS - 1)
    store.runs.create("p", wire.RunCreate(run_id="empty"), NOW)
    copy_often(store, "empty", EMPTY_RUNS - 1)
    app_state = _state_of(store, folder)
    app_state.summariser.keep_points()
    moments = iter(np.arange(app_state.clock() - 3600, app_state.clock() + 3600, INTERVAL).tolist())
    series = Evaluation(enabled_alerts()).series
    evaluator = AlertEvaluator(
        store,
        lambda: exposition.samples(app_state, series),
        enabled_alerts(),
        clock=lambda: next(moments),
        interval_seconds=INTERVAL,
    )
    # What fires in the first round is stored in it.
    evaluator.do_due_work()
    evaluation, samples = evaluator._evaluation, list(exposition.samples(app_state, series))
    assert evaluation is not None
    for _ in range(int(3600 / INTERVAL)):
        evaluation.observe(next(moments), samples)
    _, seconds = beside(lambda: None, evaluator.do_due_work, rounds)
    what = f"{RUNS} runs that measure, {RUNS} that only log, {EMPTY_RUNS} empty"
    return [
        *page_figures(app_state, f"/metrics of {what}", rounds, 1.0),
        Figure(f"a round of alerts over {what}", "CPU-s", seconds, 0.3),
    ]


def measure_journal(store: Store, rounds: int, seed: int) -> list[Figure]:
    """A heatmap of a run of which nothing is sealed, beside its blobs read and summed."""
    seal_run(store, "unsealed", twenty(JOURNAL_LAYERS), JOURNAL_POINTS, seed=seed, sealed=False)
    asked = Selection(by_layer=True, points=200)

    def ask() -> None:
        with store.points.snapshot() as snapshot:
            snapshot.points(["unsealed"], EDQ, asked)

    def read() -> None:
        with store.reading() as connection:
            blobs = connection.execute(select(report.c.statistics).where(report.c.run_id == "unsealed")).scalars()
            np.frombuffer(b"".join(blobs), dtype="<f8").sum()

    ratios, seconds = beside(read, ask, rounds)
    what = f"heatmap of {JOURNAL_POINTS} unsealed points × {JOURNAL_LAYERS} layers"
    return [
        Figure(f"{what}, CPU / its blobs read and summed", "×", ratios, 4.0),
        Figure(what, "CPU-ms", tuple(1e3 * took for took in seconds)),
    ]


def measure(options: Options) -> Measuring:
    """All of them, on a store each."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stores = []
        for name in ("exports", "page", "sealed", "journal", "kinds"):
            store = UnsyncedStore(root / name / "collage.sqlite", stale_after_seconds=600.0)
            store.open()
            stack.callback(store.close)
            stores.append(store)
        yield from measure_exports(stores[0], rounds, options.seed)
        yield from measure_page(stores[1], root / "page", rounds, options.seed, sealed=False)
        yield from measure_page(stores[2], root / "sealed", rounds, options.seed, sealed=True)
        yield from measure_journal(stores[3], rounds, options.seed)
        yield from measure_all_kinds(stores[4], root / "kinds", rounds, options.seed)
    return [f"{rounds} rounds, each beside its reference; {STEPS} steps exported"]


if __name__ == "__main__":
    sys.exit(main("scale", __doc__ or "", measure))
